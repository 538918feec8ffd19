"""Durations, sizes, names: what is accepted, what is refused, and how they are shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.ids import check_model_name, check_node_id
from llmgw.domain.report import Presence, judge_presence
from llmgw.errors import NameInvalid, UnitError
from llmgw.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5), ("1m30s", 90), ("2h", 7200), ("250ms", 0.25), ("1.5h", 5400), ("1d", 86400), (" 3s ", 3)],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "5x", "1m-30s", "5 s", "five", "1m30", "-5s", "5s!"])
def test_what_is_not_a_duration_is_refused(text):
    with pytest.raises(UnitError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("16MB", 16_000_000), ("2GiB", 2**31), ("512 KiB", 2**19), ("100B", 100), ("1.5G", 1_500_000_000)],
)
def test_sizes_are_read(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "5", "MB", "5XB", "-5MB", "5 5MB"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(UnitError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 10**7))
def test_a_shown_duration_reads_back_within_its_two_units(seconds):
    shown = parse_duration(format_duration(seconds))
    assert abs(shown - seconds) <= max(1, seconds / 24)


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (16_000_000, "16 MB"), (5 * 10**12, "5.0 TB")]
)
def test_sizes_are_shown(count, shown):
    assert format_size(count) == shown


@pytest.mark.parametrize("name", ["a", "gpu-a-01", "node.example.com", "A_1"])
def test_node_ids_are_host_names(name):
    assert check_node_id(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a\nb", "\u0430", "a" * 254, "a.", "../x"])
def test_what_is_no_host_name_is_no_node_id(name):
    with pytest.raises(NameInvalid):
        check_node_id(name)


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen/Qwen3:8b@main+x"])
def test_model_names(name):
    assert check_model_name(name) == name


@pytest.mark.parametrize("name", ["", "-x", "a..b", "a b", "a\x00", "é"])
def test_what_is_no_model_name(name):
    with pytest.raises(NameInvalid):
        check_model_name(name)


@pytest.mark.parametrize(
    ("last_seen", "connected", "presence"),
    [
        (None, False, Presence.NEVER),
        (None, True, Presence.STALE),
        (100, True, Presence.CONNECTED),
        (100, False, Presence.STALE),
        (90, True, Presence.STALE),
        (84, True, Presence.LOST),
        (84, False, Presence.LOST),
    ],
)
def test_presence_follows_the_age_of_the_last_report(last_seen, connected, presence):
    found, words = judge_presence(last_seen, connected, 100.0, 5.0, 3)
    assert found is presence
    assert words
