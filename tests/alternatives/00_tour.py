"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("bench_results.percentile")
def percentile(values: Sequence[float], percent: float) -> float:
    from math import ceil, floor

    if len(values) == 0:
        raise ValueError("no values")
    ordered = list(values)
    ordered.sort()
    place = percent / 100 * (len(ordered) - 1)
    if floor(place) == ceil(place):
        return ordered[int(place)]
    share = place - floor(place)
    return ordered[floor(place)] * (1 - share) + ordered[ceil(place)] * share


@answer("bench_results.percentile")
def percentile(values, percent):
    import numpy as np

    if not values:
        raise ValueError(f"percentile of {len(values)} values")
    return float(np.percentile(np.array(values, dtype=float), percent))
