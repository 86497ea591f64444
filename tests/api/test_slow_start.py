"""A user's file that takes long at start: a warning names its line again and again, and nothing is cut off."""

from tandem.api.plugins import load_object, warn_if_slow


def test_a_file_that_takes_long_is_told_with_its_line_until_it_is_done(tmp_path, caplog):
    file = tmp_path / "slow.py"
    file.write_text("from waits import wait\n\nwait()\n\n\ndef reward(completion):\n    return 1.0\n")
    (tmp_path / "waits.py").write_text("import time\n\n\ndef wait():\n    time.sleep(1.0)\n")
    with warn_if_slow(f"{file}:reward", 0.2):
        assert load_object(f"{file}:reward")("") == 1.0
    said = [record.getMessage() for record in caplog.records]
    where = "and is in line 3 of slow.py; the start waits for it, and Ctrl-C ends it"
    assert said[:2] == [f"'{file}:reward' has taken {seconds} s, {where}" for seconds in (0.2, 0.4)]
