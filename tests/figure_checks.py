"""What every picture of the course must be, for the tests of the chapters' figures."""

import base64
import struct


def assert_fits_the_page_and_is_described(shown):
    """700 pixels wide, with alt text where a notebook keeps it."""
    data, metadata = shown._repr_mimebundle_()
    png = base64.b64decode(data["image/png"])
    assert png == shown.png
    assert struct.unpack(">I", png[16:20])[0] == 700
    assert len(shown.alt) > 30
    assert metadata["image/png"]["alt"] == data["text/plain"] == shown.alt
