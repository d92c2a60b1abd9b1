"""The messages of chapter 09's open problem, and how their bytes are counted."""

import pytest

from course.props import wire
from minivllm.leader import StepMessage

pytestmark = pytest.mark.course


def test_messages_are_the_same_each_time():
    """Scores of different days can be compared."""
    assert wire.messages() == wire.messages()


def test_messages_release_what_they_introduce():
    """Except the requests of the last step."""
    messages = wire.messages()
    introduced = [number for message in messages for number, _ in message.new_tokens]
    released = [number for message in messages for number in message.released]
    assert introduced == sorted(set(introduced))
    assert set(released) < set(introduced)
    assert len(introduced) > 24, "some requests are preempted and come back"


def test_compression_keeps_the_messages():
    """Fewer bytes, none of them changed."""
    messages = wire.messages()[:50]
    plain = wire.sent(messages, wire.Json)
    zipped = wire.sent(messages, wire.Zipped)
    assert zipped["bytes"] < plain["bytes"]
    assert plain["changed"] == zipped["changed"] == 0


def test_a_changed_message_is_counted():
    """An encoder that forgets a field gains nothing."""

    class Forgetful(wire.Json):
        def pack(self, message):
            return StepMessage([], [], [], [], True).encode()

    message = StepMessage([1], [], [], [], True)
    assert wire.sent([message, message], Forgetful)["changed"] == 2


def test_each_end_has_an_object_of_its_own():
    """State travels in bytes only."""

    class Cheat(wire.Json):
        def pack(self, message):
            self.kept = message
            return b""

        def unpack(self, data):
            return self.kept

    with pytest.raises(AttributeError):
        wire.sent([StepMessage([], [], [], [], True)], Cheat)
