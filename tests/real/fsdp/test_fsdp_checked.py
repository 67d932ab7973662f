"""The oracles of `fully_shard` are those that were compared with torch."""

import fsdp_checked
import pytest


def test_oracles_are_those_that_were_checked() -> None:
    recorded = fsdp_checked.recorded()["oracles"]
    assert recorded == fsdp_checked.digest(), "an oracle has changed: run `python tests/fsdp_checked.py`"


@pytest.mark.parametrize("changed", [{"torch": "2.0.0"}, {"oracles": "of others"}])
def test_comparisons_with_torch_run_if_torch_or_an_oracle_has_changed(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = {"torch": fsdp_checked.TORCH, "oracles": fsdp_checked.digest()}
    monkeypatch.setattr(fsdp_checked, "recorded", lambda: checked)
    assert [mark.name for mark in fsdp_checked.unless_checked()] == ["full"]
    monkeypatch.setattr(fsdp_checked, "recorded", lambda: checked | changed)
    assert fsdp_checked.unless_checked() == []
