"""Words that are one token each: what filler prompts are made of.

A table holds units of one byte width, such as a space and four letters, or the digits of a token id
and a comma. Equal widths make a prompt a table look-up and every offset in it arithmetic. The words
are found in a local tokenizer, or checked against the server's own `/tokenize`; with neither, common
English words are taken, which most vocabularies hold whole, and the table says that it is not exact.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentx.errors import InputError

FEWEST_WORDS = 64
"""Words that a table needs for its filler to be varied."""
MOST_WORDS = 4096
CHECK_LENGTH = 512
"""Words of a text that is tokenised to check them together."""
MOST_CHECKS = 64
"""Calls to a server's `/tokenize` at most."""
PLAIN_IDS = range(1000, 8000)
"""Token ids taken where the vocabulary's size is not known: every served model has as many."""

COMMON_WORDS = """
able area army away back ball band bank base bath bear beat been bell best bird blue boat body book born both bowl burn
busy cake call calm came camp card care case cash cast cell chat chip city club coal coat code cold come cook cool copy
corn cost crew crop dark data date dawn days dead deal dean dear debt deep desk diet disk does done door down draw
drop drug dual duke dust duty each earn ease east easy edge else even ever exit face fact fail fair fall farm fast fear
feed feel feet fell file fill film find fine fire firm fish five flat flow food foot form fort four free from fuel full
fund gain game gate gave gear gift girl give glad goal goes gold golf gone good gray grew grid grow hair half hall hand
hang hard harm have head hear heat held help here hero high hill hire hold hole holy home hope host hour huge idea inch
into iron item jack join jump jury just keen keep kept kick kind king knew know lack lady laid lake land lane last late
lead left less life lift like line link list live load loan lock long look lord lose loss lost love luck made mail main
make many mark mass meal mean meat meet menu mile milk mind mine miss mode mood moon more most move much must name navy
near neck need news next nice nine none noon nose note okay once only open oral over pace pack page paid pain pair palm
park part pass past path peak pick pink pipe plan play plot plus poll pool poor port post pull pure push race rail rain
rank rare rate read real rear rely rent rest rice rich ride ring rise risk road rock role roll roof room root rose rule
rush safe said sake sale salt same sand save seat seed seek seem seen self sell send sent ship shop shot show shut sick
side sign site size skin slip slow snow soft soil sold sole some song soon sort soul spot star stay step stop such suit
sure take tale talk tall tank tape task team tech tell tend term test text than that them then they thin this thus time
tiny told toll tone took tool tour town tree trip true tune turn twin type unit upon used user vary vast very vice view
vote wage wait walk wall want warm wash wave ways weak wear week well went were west what when whom wide wife wild will
wind wine wing wire wise wish with wood word work yard yeah year your zero zone
"""


@dataclass(frozen=True, slots=True)
class WordTable:
    """Filler units of one width."""

    units: npt.NDArray[np.uint8]
    """Shape (words, width in bytes)."""
    ids: bool
    """The units are token ids for a token-id prompt, not text."""
    exact: bool
    """Each unit is known to be one token wherever it stands."""
    source: str

    def __len__(self) -> int:
        return len(self.units)


def words_from_tokenizer(path: Path) -> WordTable:
    """The table of a local tokenizer: `tokenizer.json`, or a folder that holds it.

    Raises InputError where it cannot be read or has too few whole words.
    """
    tokenizer = _load(path)
    by_length: dict[int, list[str]] = {}
    for token_id in sorted(tokenizer.get_vocab(with_added_tokens=False).values()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        bare = text.strip()
        if bare.isascii() and bare.isalpha() and bare.islower() and 2 <= len(bare) <= 12:
            by_length.setdefault(len(bare), []).append(bare)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    def alone(word: str) -> bool:
        return count(" " + word) == 1 and count(word) == 1

    best: list[str] = []
    for words in by_length.values():
        kept = [word for word in dict.fromkeys(words) if alone(word)]
        best = kept if len(kept) > len(best) else best
    best = [word for part in _parts(best) for word in _together(part, count)]
    return _table(best[:MOST_WORDS], exact=True, source=f"tokenizer {path.name}")


async def words_from_server(tokenize: Callable[[str], Awaitable[Sequence[int]]]) -> WordTable:
    """The common words that the server's own tokenizer holds whole; raises InputError where they are too few.

    One text of all words, each on a line of its own, tells which are one token: the most frequent
    token is the line end, and what stands between two of them is a word. A second text without line
    ends checks those that are left.
    """
    words = COMMON_WORDS.split()
    ids = list(await tokenize("".join(f"\n {word}" for word in words) + "\n"))
    line_end = Counter(ids).most_common(1)[0][0] if ids else None
    ends = [place for place, token in enumerate(ids) if token == line_end]
    between = [after - before - 1 for before, after in itertools.pairwise(ends)]
    alone = [word for word, n in zip(words, between, strict=False) if n == 1] if len(between) == len(words) else words
    checks = 0

    async def whole(part: Sequence[str]) -> list[str]:
        """The words of which a text gives one token each, found by halving."""
        nonlocal checks
        checks += 1
        if checks > MOST_CHECKS or not part:
            return []
        if len(await tokenize("".join(" " + word for word in part))) == len(part):
            return list(part)
        if len(part) == 1:
            return []
        middle = len(part) // 2
        return await whole(part[:middle]) + await whole(part[middle:])

    return _table(await whole(alone), exact=True, source="the server's /tokenize")


def common_words() -> WordTable:
    """The built-in words; most vocabularies hold them whole, but that is not known."""
    return _table(COMMON_WORDS.split(), exact=False, source="built-in words")


def token_ids(vocab_size: int | None) -> WordTable:
    """Token ids of the digit count that gives the most of them, for prompts given as ids."""
    if vocab_size is None:
        chosen = list(PLAIN_IDS)[:MOST_WORDS]
    else:
        spans = [list(range(10**digits, min(10 ** (digits + 1), vocab_size))) for digits in range(1, 7)]
        chosen = max(spans, key=lambda span: len(span))[:MOST_WORDS]
    if len(chosen) < FEWEST_WORDS:
        raise InputError(f"a vocabulary of {vocab_size} tokens has too few ids", "leave out --prompt token-ids")
    units = np.frombuffer("".join(f"{number}," for number in chosen).encode(), dtype=np.uint8)
    source = "token ids" if vocab_size is None else f"token ids of a vocabulary of {vocab_size}"
    return WordTable(units.reshape(len(chosen), -1), ids=True, exact=True, source=source)


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("--tokenizer needs the package tokenizers", "pip install tokenizers") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--tokenizer {path}: no tokenizer.json there", "give the file, or the model's folder")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise InputError(f"--tokenizer {file}: cannot be read: {error}", "is it a tokenizer.json?") from error


def _parts(words: Sequence[str]) -> Iterable[Sequence[str]]:
    return (words[at : at + CHECK_LENGTH] for at in range(0, len(words), CHECK_LENGTH))


def _together(words: Sequence[str], count: Callable[[str], int]) -> list[str]:
    """The words that stay one token each in a text of them, found by halving."""
    if count("".join(" " + word for word in words)) == len(words):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return _together(words[:middle], count) + _together(words[middle:], count)


def _table(words: Sequence[str], *, exact: bool, source: str) -> WordTable:
    widths = {len(word) for word in words}
    if len(words) < FEWEST_WORDS:
        raise InputError(
            f"{source}: only {len(words)} words of one length are single tokens, {FEWEST_WORDS} are needed",
            "use --prompt token-ids, or another --tokenizer",
        )
    assert len(widths) == 1
    units = np.frombuffer("".join(" " + word for word in words).encode(), dtype=np.uint8)
    return WordTable(units.reshape(len(words), -1), ids=False, exact=exact, source=source)
