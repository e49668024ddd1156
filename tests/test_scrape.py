"""Server counters: the public bug reports as cases, their siblings, and the recorded bytes of real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentx.scrape import Change, change, look, n_series


def case(shared: Path, name: str, model: str | None = None, *, before: bool = True) -> Change:
    inputs = shared / "cases" / "inputs"
    start = (inputs / f"{name}.before.prom").read_text() if before else ""
    return change(look(start), look((inputs / f"{name}.after.prom").read_text()), model)


def test_old_and_new_names_count_once(shared: Path) -> None:
    found = case(shared, "E01")
    assert (found.counts["cache_queries"], found.counts["cache_hits"], found.cache_hit) == (4000, 2000, 0.5)
    assert found.sources["cache_queries"] == "vllm:prefix_cache_queries_total"


def test_engines_are_summed_and_other_models_left_out(shared: Path) -> None:
    found = case(shared, "E03", "m")
    assert (found.counts["cache_queries"], found.counts["cache_hits"]) == (1000, 180)
    assert found.cache_hit == pytest.approx(0.18)
    after = look((shared / "cases/inputs/E03.after.prom").read_text())
    assert n_series(after, "vllm:prefix_cache_queries_total", "m") == 2


@pytest.mark.parametrize("spelling", ["colon", "underscore"])
def test_both_spellings_of_a_prefix(shared: Path, spelling: str) -> None:
    found = case(shared, f"E05.{spelling}")
    assert (found.counts["prompt_tokens"], found.counts["cache_hits"], found.cache_hit) == (8000, 6000, 0.75)


def test_tiers_are_asked_in_turn(shared: Path) -> None:
    found = case(shared, "E08")
    counts = found.counts
    assert counts["cache_hits"] / counts["cache_queries"] == 0.25  # type: ignore[operator]
    assert counts["external_hits"] / counts["external_queries"] == 0.5  # type: ignore[operator]
    assert found.cache_hit == 0.625


def test_odd_but_legal_lines_are_read(shared: Path) -> None:
    found = case(shared, "E10", before=False)
    assert (found.counts["cache_queries"], found.counts["cache_hits"], found.cache_hit) == (1200, 300, 0.25)
    ttft = found.histograms["ttft"]
    assert ttft is not None
    assert (ttft.n, ttft.cumulative[0]) == (4, 3)


def test_beyond_the_last_bound_only_the_bound_is_known(shared: Path) -> None:
    e2e = case(shared, "E12", before=False).histograms["e2e"]
    assert e2e is not None
    assert (e2e.percentile(0.5)[0], e2e.n, e2e.mean_s) == (30.0, 100, 90.0)
    assert e2e.percentile(0.9) == e2e.percentile(0.99) == (None, 60.0)


def test_only_the_difference_counts(shared: Path) -> None:
    found = case(shared, "E14")
    assert (found.counts["cache_queries"], found.counts["cache_hits"], found.cache_hit) == (100_000, 25_000, 0.25)


def test_a_restart_is_told_and_counts_from_zero() -> None:
    found = change(look("vllm:prefix_cache_queries_total 900\n"), look("vllm:prefix_cache_queries_total 50\n"))
    assert (found.counts["cache_queries"], found.restarted) == (50, ("vllm:prefix_cache_queries_total",))


def test_what_is_not_told_is_none() -> None:
    found = change(look(""), look("something_else 1\n"))
    assert set(found.counts.values()) == {None}
    assert set(found.histograms.values()) == {None}
    assert found.cache_hit is None
    idle = change(look("vllm:prefix_cache_queries_total 5\nvllm:prefix_cache_hits_total 1\n"),
                  look("vllm:prefix_cache_queries_total 5\nvllm:prefix_cache_hits_total 1\n"))  # fmt: skip
    assert idle.cache_hit is None


def test_an_empty_histogram_has_no_percentile() -> None:
    text = 'vllm:time_to_first_token_seconds_bucket{le="1"} 0\nvllm:time_to_first_token_seconds_bucket{le="+Inf"} 0\n'
    ttft = change(look(""), look(text)).histograms["ttft"]
    assert ttft is not None
    assert ttft.percentile(0.5) == (None, None)
    assert ttft.mean_s is None


@pytest.mark.parametrize(("engine", "hits", "model"), [("vllm", 125_376, "tiny"), ("llama_cpp", 122_629, None)])
def test_recorded_bytes_of_real_engines(shared: Path, engine: str, hits: int, model: str | None) -> None:
    def body(name: str) -> str:
        raw = (shared / "captures" / engine / f"{name}.raw").read_bytes()
        return raw.partition(b"\r\n\r\n")[2].decode()

    whole = change(look(""), look(body("metrics_after")), model)
    assert whole.counts["cache_hits"] == hits
    assert 0 < whole.cache_hit < 1  # type: ignore[operator]
    window = change(look(body("metrics_before")), look(body("metrics_after")), model)
    assert 0 <= window.counts["cache_hits"] <= hits  # type: ignore[operator]
    assert window.counts["generation_tokens"] > 0  # type: ignore[operator]


def test_a_bucket_without_a_number_is_left_out() -> None:
    text = 'vllm:time_to_first_token_seconds_bucket{le="%s"} 4\n'
    after = look(text % "abc" + text % "NaN" + text % "0.5" + text % "+Inf")
    found = change(look(""), after).histograms["ttft"]
    assert found is not None
    assert found.bounds == (0.5, float("inf"))
    assert change(look(""), look(text.replace(" 4", " NaN") % "+Inf")).histograms["ttft"] is None
