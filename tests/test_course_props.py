"""What experiments in lessons use: the scoreboard of an open problem."""

from course.props.scoreboard import scoreboard


def test_the_best_of_each_column_has_the_star():
    """The lowest number, or the highest where more is better; ties share it."""
    results = {
        "ours": {"steps": 12, "found (more)": 0.5},
        "yours": {"steps": 10, "found (more)": 0.25},
        "the rival's": {"steps": 10, "found (more)": 0.125},
    }
    head, ours, yours, rival, last = scoreboard(results, "Fewer steps win.").split("\n")
    assert head.split() == ["steps", "found", "(more)"]
    assert ours.split() == ["ours", "12", "0.5*"]
    assert yours.split() == ["yours", "10*", "0.25"]
    assert rival.split() == ["the", "rival's", "10*", "0.125"]
    assert last == "* best of its column. Fewer steps win."
