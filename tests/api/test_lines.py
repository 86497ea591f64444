"""A line of JSON is one line for every reader."""

import json

from tandem.api.shared_files import json_line


def test_a_text_with_unicodes_ends_of_lines_is_one_line_and_is_read_back_as_it_was():
    text = "".join(map(chr, range(0x2100))) + "𝛼"
    line = json_line({"text": text})
    assert line.splitlines() == [line]
    assert json.loads(line) == {"text": text}
