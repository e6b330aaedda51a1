"""`resilio diff`: what differs is named, by digests first; nothing else is."""

from __future__ import annotations

import json
from typing import Any

from resilio.cli.diff_pages import diff_page


def test_a_checkpoint_is_the_same_as_itself_and_no_data_is_read_for_it(resilio: Any, branched: Any) -> None:
    for path in branched.folder.rglob("__0_0.distcp"):
        path.unlink()
    code, out, _ = resilio("diff", branched.url, "300", "000000300-g000002")
    assert (code, out.splitlines()) == (
        0,
        ["000000300-g000002  ->  000000300-g000002", "", "tensors: 2 same; 0 values different; 0 B of data read"],
    )


def test_what_changed_is_counted_and_what_did_not_is_left_out(resilio: Any, branched: Any) -> None:
    code, out, _ = resilio("diff", branched.url, "100", "300", "--json")
    assert code == 1
    page = json.loads(out)
    assert page["a"] == {"url": branched.url, "name": "000000100-g000001", "step": 100, "generation": 1}
    assert page["b"]["name"] == "000000300-g000002"
    assert page["same"] is False
    assert page["tensors"] == {
        "counts": {"same": 1, "changed": 1, "reshaped": 0, "added": 0, "removed": 0},
        "read_bytes": 16,
        "different": [
            {
                "name": "optimizer.state.weight.step",
                "kind": "changed",
                "elements": 1,
                "of": 1,
                "largest": 200.0,
                "before": {"dtype": "int64", "shape": []},
                "after": {"dtype": "int64", "shape": []},
            }
        ],
    }
    assert page["values"] == [{"name": "step", "in_a": True, "in_b": True, "a": 100, "b": 300}]
    out = resilio("diff", branched.url, "100", "300")[1]
    assert "optimizer.state.weight.step  changed    1 of 1             200" in out
    assert resilio("diff", branched.url, "100", "300", "--match", "model.*")[0] == 0


def test_b_is_the_newest_or_of_another_run(resilio: Any, branched: Any, tmp_path: Any) -> None:
    assert json.loads(resilio("diff", branched.url, "100", "--json")[1])["b"]["step"] == 400
    other = type(branched)(tmp_path / "other")
    other.begin(1)
    other.commit(100, n_bytes=100)
    code, out, _ = resilio("diff", branched.url, "100", "100", "--other", other.url)
    assert code == 1
    assert "model.weight  uint8 200000 -> uint8 100  " in out
    assert out.startswith(f"000000100-g000001  ->  000000100-g000001  of {other.url}\n")
    assert resilio("diff", branched.url, "100", "7")[0] == 4


def test_damage_where_it_is_read_is_1_and_named(resilio: Any, branched: Any) -> None:
    path = branched.folder / "step-000000100-g000001-7f3a" / "__0_0.distcp"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, out, err = resilio("diff", branched.url, "100", "300")
    assert (code, out) == (1, "")
    assert "__0_0.distcp" in err and "is damaged" in err


def test_the_page_shows_the_largest_change_first_and_is_bounded() -> None:
    head = {"dtype": "float32", "shape": [2]}
    rows = [
        {"name": f"t{i}", "kind": "changed", "elements": 1, "of": 2, "largest": i, "before": head, "after": head}
        for i in [*range(50), None, float("nan")]
    ]
    rows[50]["name"] = "bits"
    side = {"url": "x", "name": "n", "step": 1, "generation": 1}
    values = [{"name": "v\x1b", "in_a": True, "in_b": False, "a": "\x1b[31m" * 50, "b": None}]
    counts = {"same": 0, "changed": 52}
    page = {"a": side, "b": side, "tensors": {"counts": counts, "read_bytes": 1, "different": rows}, "values": values}
    lines = []
    for part in diff_page(page):
        lines += [part] if isinstance(part, str) else list(part.lines())
    names = [line.split()[0] for line in lines if " changed  " in line]
    assert (names[0], names[1], len(names)) == ("tnan", "t49", 40)
    assert " … and 12 more; --json has all" in lines
    assert not any("\x1b" in line for line in lines)
