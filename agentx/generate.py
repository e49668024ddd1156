"""Profile to corpus: the sampled table, its manifest, and the folder that holds them.

A corpus is known by the digest of the profile that made it and by the digest of its own content. A
folder is used again only where both are right, so an edited profile never meets an old corpus and a
damaged file is made anew.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from agentx import __version__, reference, store
from agentx.corpus import Corpus, load_corpus
from agentx.corpus.export import MARKER, is_corpus_folder, joined_sha256, write_weka
from agentx.corpus.parquet import FORMAT, FORMAT_VERSION, MANIFEST, write_parquet
from agentx.corpus.sessions import ID_RULE, content_digest, make_corpus
from agentx.errors import InputError
from agentx.turns import CORPUS_SCHEMA, ROOT
from agentx.units import NS_PER_S

if TYPE_CHECKING:
    from agentx.profile import AnyProfile, Profile

FORMS = ("parquet", "weka")

Check = Callable[[Corpus], None]
"""Raises where a corpus must not be handed out."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A corpus on disk, and how it came to be there."""

    corpus: Corpus
    folder: Path
    reused: bool
    reason: str
    """Why it was made anew; empty where it was reused or nothing was there."""


def generate(profile: AnyProfile) -> tuple[pa.Table, dict[str, Any]]:
    """(table in CORPUS_SCHEMA, manifest) of a profile; the same profile gives the same of both.

    Raises InputError where the profile is a recorded corpus.
    """
    profile = generated_profile(profile)
    parameters = reference_parameters(profile)
    table = _table(parameters, reference.draw(parameters), profile.model_tag)
    rule = {"rule": ID_RULE, "seed": parameters.seed}
    keep, new = (table[name].to_numpy().astype(np.int64).sum() for name in ("keep_blocks", "new_blocks"))
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "form": "parquet",
        "name": profile.name,
        "digest": content_digest(table, parameters.block_size, "local", rule),
        "profile": _profile_facts(profile),
        "seed": parameters.seed,
        "sampler": {"name": profile.sampler, "version": reference.VERSION},
        "block_size": parameters.block_size,
        "hash_id_scope": "local",
        "id_rule": rule,
        "counts": {
            "sessions": parameters.sessions,
            "turns": table.num_rows,
            "input_tokens": int(table["input_tokens"].to_numpy().astype(np.int64).sum()),
            "output_tokens": int(table["output_tokens"].to_numpy().astype(np.int64).sum()),
            "blocks": int(keep + new),
            "new_blocks": int(new),
        },
        "versions": {"agentx": __version__, "python": platform.python_version()},
    }
    return table, manifest


def generate_corpus(
    profile: AnyProfile, out: Path, *, form: str = "parquet", check: Check | None = None, force: bool = False
) -> Generated:
    """The profile's corpus in the folder `out`, made there unless it already is; `form` is one of FORMS.

    `check` sees the corpus as it is on disk, before the folder appears under its name: where it
    raises, nothing is handed out. Raises InputError where `out` holds something agentx did not make.
    """
    if form not in FORMS:
        raise InputError(f"format {form!r} is not known", f"choose one of {', '.join(FORMS)}")
    profile = generated_profile(profile)
    kept, reason = (None, "asked for") if force else _reusable(profile, out, form)
    if kept is not None:
        if check is not None:
            check(kept)
        return Generated(kept, out, reused=True, reason="")
    table, manifest = generate(profile)
    with store.atomic_folder(out, is_corpus_folder) as folder:
        if form == "parquet":
            write_parquet(folder, table, manifest)
        else:
            write_weka(as_corpus(table, manifest), folder)
        corpus = replace(load_corpus(folder), source=str(out))
        if check is not None:
            check(corpus)
    return Generated(corpus, out, reused=False, reason=reason)


def generated_profile(profile: AnyProfile) -> Profile:
    """The profile, known to be one that a corpus is generated from; raises InputError for a recorded one."""
    if profile.source == "recorded":
        raise InputError(
            f"profile {profile.name!r} is a recorded corpus, there is nothing to generate",
            "fetch the recording and replay it with --corpus",
        )
    return profile


def reference_parameters(profile: Profile) -> reference.Parameters:
    """What the reference sampler reads of a profile."""
    return reference.Parameters(
        seed=profile.seed,
        sessions=profile.sessions,
        block_size=profile.block_size,
        id_prefix=profile.id_prefix,
        isl=profile.isl,
        osl=profile.osl,
        delay=profile.delay,
        turn_values=profile.turns.values,
        turn_weights=profile.turns.weights,
        cache_hit=profile.cache_hit,
        isl_clamp=profile.clamps.isl,
        osl_clamp=profile.clamps.osl,
        delay_clamp=profile.clamps.delay,
    )


def _table(parameters: reference.Parameters, drawn: reference.Draws, model: str) -> pa.Table:
    n = len(drawn.input_tokens)
    lengths = np.array(drawn.turns, dtype=np.int64)
    first_rows = np.cumsum(lengths) - lengths
    seeds = range(parameters.sessions)
    ids = pa.array([reference.session_id(parameters.id_prefix, parameters.seed, index) for index in seeds], pa.string())
    session_ids = ids.take(pa.array(np.repeat(np.arange(parameters.sessions), lengths)))
    think_ns = np.array(drawn.think_s, dtype=np.int64) * NS_PER_S
    elapsed = np.cumsum(think_ns)
    none = np.full(n, ROOT, dtype=np.int32)
    columns = {
        "root_session_id": session_ids,
        "session_id": session_ids,
        "parent_session_id": pa.nulls(n, pa.string()),
        "turn": np.arange(n) - np.repeat(first_rows, lengths),
        "spawn_turn": none,
        "join_turn": none,
        "t_ns": elapsed - np.repeat(elapsed[first_rows], lengths),
        "api_ns": np.zeros(n, dtype=np.int64),
        "think_ns": think_ns,
        "input_tokens": drawn.input_tokens,
        "output_tokens": drawn.output_tokens,
        "model": pa.repeat(pa.scalar(model), n),
        "keep_blocks": drawn.keep_blocks,
        "new_blocks": drawn.new_blocks,
        "new_ids": pa.nulls(n, pa.list_(pa.uint64())),
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in CORPUS_SCHEMA], schema=CORPUS_SCHEMA)


def _profile_facts(profile: Profile) -> dict[str, Any]:
    return {"name": profile.name, "digest": profile.digest(), "resolved": profile.model_dump(mode="json")}


def as_corpus(table: pa.Table, manifest: dict[str, Any]) -> Corpus:
    """The corpus of `generate`'s table and manifest, in memory."""
    return make_corpus(
        table,
        block_size=manifest["block_size"],
        scope=manifest["hash_id_scope"],
        name=manifest["name"],
        source=manifest["profile"]["name"],
        manifest=manifest,
    )


def _reusable(profile: Profile, out: Path, form: str) -> tuple[Corpus | None, str]:
    """(the corpus in `out` where it is this profile's and whole, else None; why it is not used)."""
    manifest_path = out / (MANIFEST if form == "parquet" else MARKER)
    if not out.is_dir() or not is_corpus_folder(out):
        return None, ""
    if not manifest_path.is_file():
        return None, "it was in another format"
    try:
        manifest = store.read_json(manifest_path)
        if not isinstance(manifest, dict):
            return None, "its manifest is damaged"
        if manifest.get("profile") != _profile_facts(profile):
            return None, "the profile is not the one it was made from"
        if manifest.get("sampler") != {"name": profile.sampler, "version": reference.VERSION}:
            return None, "the sampler has changed"
        if form == "weka" and joined_sha256(out) != manifest.get("files_sha256"):
            return None, "its files are damaged or changed"
        corpus = load_corpus(out)
    except InputError as error:
        return None, f"its files are damaged: {error}"
    if form == "parquet" and corpus.digest != manifest.get("digest"):
        return None, "its content is damaged or changed"
    return corpus, ""
