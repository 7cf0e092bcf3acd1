# SPDX-License-Identifier: MIT
"""What the counts of earlier runs bring: the first tokens after a start, without and with them.

    python bench/starts.py                                  # the tiny model
    python bench/starts.py --model MODEL.gguf --share 0.25
    python bench/starts.py --rpc 127.0.0.1:50052 --device RPC0

Texts of the first half leave the counts. Each prompt of the second half gets an answer from a start without
counts, and from one with them; the answers are equal. --wait: what a person needs to type.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loops import add_model_and_text, prompts
from quality import convert

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.cli.options import add_rpc_devices
from pyhobbit.engine.engine import Engine
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.model.file_names import uses_path
from pyhobbit.native.files import read_text
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

COLUMNS = ("start", "wait", "misses, prompt", "first token", "misses, answer", "answer", "MB read")
SAMPLING = SamplingConfig(seed=1)


@dataclass(frozen=True)
class Answer:
    """Misses of the prompt and after it, seconds of the first token and of those after it."""

    text: str
    prompt_misses: int
    first_s: float
    misses: int
    rest_s: float
    n_bytes: int


def answer(engine: Engine, prompt: str, n_tokens: int) -> Answer:
    """To a prompt that shares nothing with the last one."""
    before = engine.stats().cache
    stream = engine.generate(prompt, n_tokens, SAMPLING)
    first = next(stream)
    middle = engine.stats().cache
    pieces = [first, *stream]
    after = engine.stats().cache
    return Answer(
        text="".join(piece.text for piece in pieces),
        prompt_misses=middle.misses_high - before.misses_high,
        first_s=first.time_s,
        misses=after.misses_high - middle.misses_high,
        rest_s=pieces[-1].time_s - first.time_s,
        n_bytes=after.bytes_read - before.bytes_read,
    )


def row(name: str, wait: float, answers: list[Answer]) -> str:
    """Sums of what is counted, medians of what is timed."""
    cells = (
        name,
        f"{wait:g} s",
        str(sum(each.prompt_misses for each in answers)),
        f"{median(each.first_s for each in answers):.3f} s",
        str(sum(each.misses for each in answers)),
        f"{median(each.rest_s for each in answers):.3f} s",
        f"{sum(each.n_bytes for each in answers) / 1e6:.0f}",
    )
    return table_row(cells)


def expert_bytes(model: Path) -> int:
    """Of all experts in high precision."""
    config = EngineConfig(CacheConfig(prefetch=0), n_ctx=64)
    with Session(model, config.cache.settings(), one_sequence(config), simulated=True) as session:
        return int(session.info(None).tier_bytes_high)


def pools_for(share: float, model: Path) -> int:
    """Bytes that hold this share of the experts, each rounded up to its slot."""
    return int(share * expert_bytes(model) * 1.02)


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add_model_and_text(parser)
    add("--share", type=float, default=0.3, help="of the experts that the pools hold (default: %(default)s)")
    add("--prompts", type=int, default=10, help="half of them leave the counts (default: %(default)s)")
    add("--characters", type=int, default=100, help="of each prompt (default: %(default)s)")
    add("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    add("--device", help="GPU that holds the pools (default: the CPU)")
    add("--rpc", metavar="HOST:PORT", help="ggml-rpc-server that offers it")
    add("--waits", type=float, nargs="+", default=[0.0, 3.0], help="seconds before the prompt")
    args = parser.parse_args()
    add_rpc_devices(args)
    source = (args.model or convert("f16", "q4_0")).absolute()
    starts = [each[: args.characters] for each in prompts(read_text(args.text), args.prompts)]
    earlier, later = starts[: args.prompts // 2], starts[args.prompts // 2 :]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        model.symlink_to(source)
        counts, kept = uses_path(model), Path(folder) / "kept"
        pools = int(args.share * expert_bytes(model))
        cache = CacheConfig(pools=pools, remember=True, device=args.device)
        config = EngineConfig(cache, n_ctx=512)
        with Engine(model, config) as engine:
            for prompt in earlier:
                answer(engine, prompt, args.tokens)
        shutil.move(counts, kept)
        print(f"{source.name}, {len(later)} prompts, answers of {args.tokens} tokens\n")
        print(table_head(COLUMNS))
        texts: list[list[str]] = []
        for wait in args.waits:
            arms: dict[str, list[Answer]] = {"first": [], "second": []}
            for prompt in later:
                for name, answers in arms.items():
                    counts.unlink(missing_ok=True)
                    if name == "second":
                        shutil.copyfile(kept, counts)
                    with Engine(model, config) as engine:
                        time.sleep(wait)
                        answers.append(answer(engine, prompt, args.tokens))
            for name, answers in arms.items():
                print(row(name, wait, answers), flush=True)
                texts.append([each.text for each in answers])
        if any(each != texts[0] for each in texts):
            raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
