# SPDX-License-Identifier: MIT
"""The quantisation that is recommended, from lists of files like those of much downloaded repositories."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from fake_hub import Hub, at, serving
from gguf import GGUFValueType

from pyhobbit.errors import HobbitError
from pyhobbit.model.download import Repo
from pyhobbit.model.gguf_file import (
    align,
    array_entry,
    pack_header,
    parse_head,
    scalar_entry,
    string_entry,
    tensor_nbytes,
)
from pyhobbit.model.quantize import type_by_name
from pyhobbit.model.recommend import Choice, Machine, Weights, best, choices, reason, weights_of

GB = 10**9
DISK, RAM = 3.0 * GB, 40.0 * GB


KINDS = ("iq1_s", "iq2_xxs", "q2_k", "iq3_xxs", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0", "f16")


@dataclass(frozen=True)
class Shape:
    """Layers with experts, experts of each, used ones, weights of an expert, of the rest, of a table."""

    n_layers: int
    n_experts: int
    n_used: int
    expert: float
    rest: float
    table: float = 0.0

    def header(self, size: float, n_parts: int = 1, part: int = 0) -> tuple[bytes, int]:
        """The header of one of n_parts files of about `size` bytes together, and that file's size.

        As makers do, the first layers have a larger type than the others, so that the size comes out.
        """
        types = [type_by_name(kind) for kind in KINDS]
        others = (self.rest * 6.5625 + self.table * 4.5) / 8
        bits = 8 * (size - others) / (self.n_layers * self.n_experts * self.expert)
        small, large = [pair for pair in pairwise(types) if pair[0].nbytes(256) / 32 <= bits][-1]
        n_large = (bits * 32 - small.nbytes(256)) / (large.nbytes(256) - small.nbytes(256)) * self.n_layers
        offset, placements, rows = 0, [], int(self.expert / 256)
        for layer in range(part, self.n_layers, n_parts):
            experts = large if layer < n_large else small
            for name, ggml_type, ne in (
                (f"blk.{layer}.ffn_gate_up_exps.weight", experts, (256, rows * 2 // 3, self.n_experts)),
                (f"blk.{layer}.ffn_down_exps.weight", experts, (256, rows // 3, self.n_experts)),
                (
                    f"blk.{layer}.attn_q.weight",
                    type_by_name("q6_k"),
                    (256, int(self.rest / self.n_layers / 256)),
                ),
            ):
                placements.append((name, ggml_type, ne, offset))
                offset = align(offset + tensor_nbytes(ggml_type, ne), 32)
        if self.table and part == 0:
            ne = (256, int(self.table / 256))
            placements.append(("per_layer_token_embd.weight", type_by_name("q4_k"), ne, offset))
            offset = align(offset + tensor_nbytes(type_by_name("q4_k"), ne), 32)
        keys = [
            string_entry("general.architecture", "llama"),
            scalar_entry("llama.expert_used_count", GGUFValueType.UINT32, self.n_used),
            string_entry("tokenizer.filler", "x" * 1_500_000),
        ]
        head = pack_header([] if part else keys, placements, 32)
        return head, len(head) + offset


# The style of the names and sizes in GB: those of the ten that are downloaded most, by and large.
REPOS: dict[str, tuple[Shape, str, dict[str, float]]] = {
    "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF": (
        Shape(48, 128, 8, 3 * 2048 * 768, 1.5e9),
        "Qwen3-Coder-30B-A3B-Instruct-{}.gguf",
        {"UD-IQ1_S": 8.8, "UD-Q2_K_XL": 11.8, "Q3_K_M": 14.7, "IQ4_XS": 16.4, "UD-Q4_K_XL": 17.7,
         "Q4_K_M": 18.6, "Q6_K": 25.1, "Q8_0": 32.5, "BF16": 61.1},
    ),
    "HauhauCS/Qwen3.6-35B-A3B-Uncensored": (
        Shape(40, 256, 8, 3 * 2048 * 512, 2.5e9),
        "Qwen3.6-35B-A3B-Uncensored-{}.gguf",
        {"IQ2_M": 12.0, "IQ4_XS": 18.9, "Q4_K_M": 21.3, "Q5_K_M": 25.1, "Q6_K": 28.8, "Q8_0": 37.4},
    ),
    "unsloth/Qwen3.8-Flash-Next-GGUF": (
        Shape(48, 512, 10, 3 * 2560 * 640, 5.0e9, 51.2e9),
        "{0}/Qwen3.8-Flash-Next-{0}-0000{1}-of-00003.gguf",
        {"UD-IQ1_S": 62.0, "UD-IQ1_M": 66.0, "UD-Q2_K_XL": 82.0, "UD-IQ4_XS": 98.0, "UD-Q4_K_XL": 111.0},
    ),
    "unsloth/gemma-4-26B-A4B-it-GGUF": (
        Shape(30, 128, 8, 3 * 2816 * 704, 2.6e9),
        "gemma-4-26B-A4B-it-{}.gguf",
        {"UD-IQ2_XXS": 9.9, "UD-Q3_K_XL": 12.9, "UD-Q4_K_XL": 17.1, "Q4_0": 14.4, "Q6_K": 23.2, "Q8_0": 26.9},
    ),
    "ggml-org/gpt-oss-20b-GGUF": (
        Shape(24, 32, 4, 3 * 2880 * 2880, 1.2e9),
        "gpt-oss-20b-{}.gguf",
        {"mxfp4": 12.1, "Q8_0": 12.2, "F16": 13.8},
    ),
    "unsloth/gpt-oss-120b-GGUF": (
        Shape(36, 128, 4, 3 * 2880 * 2880, 2.0e9),
        "{0}/gpt-oss-120b-{0}-0000{1}-of-00003.gguf",
        {"Q4_K_M": 62.8, "F16": 65.4},
    ),
    "LiquidAI/LFM2.5-8B-A1B-GGUF": (
        Shape(22, 32, 4, 3 * 2048 * 1792, 0.6e9),
        "LFM2.5-8B-A1B-{}.gguf",
        {"Q4_0": 4.7, "Q4_K_M": 5.0, "Q5_K_M": 5.9, "Q6_K": 6.9, "Q8_0": 8.9, "F16": 16.7},
    ),
    "unsloth/Kimi-K3-GGUF": (
        Shape(92, 896, 16, 3 * 3584 * 3072, 57e9),
        "{0}/Kimi-K3-{0}-0000{1}-of-00003.gguf",
        {"UD-TQ1_0": 620.0, "UD-Q2_K_XL": 980.0, "MXFP4": 1560.0},
    ),
    "unsloth/GLM-5.3-Flash-GGUF": (
        Shape(42, 288, 8, 3 * 4096 * 2048, 16.6e9),
        "{0}/GLM-5.3-Flash-{0}-0000{1}-of-00003.gguf",
        {"UD-IQ1_S": 93.0, "UD-Q2_K_XL": 119.0, "UD-Q4_K_XL": 182.0, "Q8_0": 341.0},
    ),
    "unsloth/DeepSeek-V4-Flash-0731-GGUF": (
        Shape(43, 256, 6, 3 * 4096 * 2048, 7e9),
        "{0}/DeepSeek-V4-Flash-0731-{0}-0000{1}-of-00003.gguf",
        {"UD-IQ1_S": 78.0, "UD-IQ3_XXS": 98.0, "UD-Q4_K_XL": 147.0, "Q8_K_XL": 162.0},
    ),
}  # fmt: skip


def _hub() -> Hub:
    """All of them; the headers are true, and the files end with them."""
    repos: dict[str, dict[str, bytes]] = {
        "u/empty": {"README.md": b""},
        "u/safe": {"model.safetensors": b"a"},
    }
    sizes: dict[str, int] = {}
    for repo, (shape, style, labels) in REPOS.items():
        files = repos[repo] = {
            "mmproj-F16.gguf": b"GGUF",
            "mtp-draft-Q8_0.gguf": b"GGUF",
            "imatrix.gguf": b"GGUF",
        }
        for name, size in labels.items():
            n_parts = 3 if "{1}" in style else 1
            for i in range(n_parts):
                file = style.format(name, i + 1)
                files[file], sizes[file] = shape.header(size * GB, n_parts, i)
    repos["u/dense"] = {f"M-{name}.gguf": _dense() for name in ("Q4_0", "Q8_0")}
    repos["u/damaged"] = {f"M-{name}.gguf": b"no model" for name in ("Q4_0", "Q8_0")}
    repos["u/cut"] = {f"M-{name}.gguf": b"GGUF\3\0\0\0\1" for name in ("Q4_0", "Q8_0")}
    repos["u/torn"] = {"M-Q4_0-00001-of-00002.gguf": b"GGUF"}
    repos["u/gated"] = {"M-Q4_0.gguf": b"", "M-Q8_0.gguf": b""}
    return Hub(repos, {"u/gated": "GatedRepo"}, sizes=sizes)


def _dense() -> bytes:
    tensor = ("blk.0.ffn_up.weight", type_by_name("f16"), (32, 2), 0)
    return pack_header([string_entry("general.architecture", "llama")], [tensor], 32) + bytes(128)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving(_hub()) as hub:
        yield hub


def _machine(gb: float, disk: float = DISK) -> Machine:
    return Machine(0.9 * gb * GB, disk)


def _choices(hub: Hub, name: str, machine: Machine) -> list[Choice]:
    repo = Repo(name)
    with at(hub.endpoint):
        return choices(repo, repo.sizes(), machine)


# QUANTs for 8, 16, 32 and 64 GB of memory.
RECOMMENDED = {
    "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF": ("UD-Q2_K_XL", "Q4_K_M", "Q6_K", "Q6_K"),
    "HauhauCS/Qwen3.6-35B-A3B-Uncensored": ("IQ4_XS", "Q5_K_M", "Q6_K", "Q6_K"),
    "unsloth/Qwen3.8-Flash-Next-GGUF": ("UD-IQ1_S", "UD-IQ1_S", "UD-IQ1_M", "UD-Q4_K_XL"),
    "unsloth/gemma-4-26B-A4B-it-GGUF": ("UD-Q3_K_XL", "UD-Q4_K_XL", "Q6_K", "Q6_K"),
    "ggml-org/gpt-oss-20b-GGUF": ("mxfp4", "F16", "F16", "F16"),
    "unsloth/gpt-oss-120b-GGUF": ("Q4_K_M", "Q4_K_M", "Q4_K_M", "F16"),
    "LiquidAI/LFM2.5-8B-A1B-GGUF": ("Q6_K", "Q6_K", "Q6_K", "Q6_K"),
    "unsloth/Kimi-K3-GGUF": (None, None, None, None),
    "unsloth/GLM-5.3-Flash-GGUF": (None, None, "UD-IQ1_S", "UD-IQ1_S"),
    "unsloth/DeepSeek-V4-Flash-0731-GGUF": (None, "UD-IQ1_S", "UD-IQ1_S", "UD-IQ1_S"),
}


@pytest.mark.parametrize("name", REPOS)
def test_what_is_recommended_by_memory(hub: Hub, name: str) -> None:
    def chosen(gb: int) -> str | None:
        found = _choices(hub, name, _machine(gb))
        return best(found).label if any(each.speed for each in found) else None

    assert tuple(map(chosen, (8, 16, 32, 64))) == RECOMMENDED[name]


def test_one_request_is_enough_for_a_file(hub: Hub) -> None:
    hub.heads.clear()
    _choices(hub, "HauhauCS/Qwen3.6-35B-A3B-Uncensored", _machine(32))
    assert hub.heads == ["Qwen3.6-35B-A3B-Uncensored-Q6_K.gguf"]
    hub.heads.clear()
    _choices(hub, "unsloth/Kimi-K3-GGUF", _machine(64))
    assert len(hub.heads) == 3  # one for each part


def test_the_estimate_by_hand(hub: Hub) -> None:
    name = "HauhauCS/Qwen3.6-35B-A3B-Uncensored"
    shape, _, labels = REPOS[name]
    head, size = shape.header(labels["IQ2_M"] * GB)  # next to the memory, so its own header is read
    weights = weights_of([parse_head(Path("m"), head, size)], size)
    assert weights.rest == pytest.approx(2.5e9 * 6.5625 / 8, rel=0.001)
    assert weights.experts == pytest.approx(size - weights.rest, rel=0.001)
    assert weights.used_experts == pytest.approx(weights.experts * 8 / 256)
    machine = _machine(12)
    share = (machine.memory - (1 << 30) - weights.rest - weights.used_experts) / weights.experts
    used = weights.rest + weights.used_experts
    seconds = used / RAM + (1 - share) ** 2 * weights.used_experts / DISK
    (row,) = (each for each in _choices(hub, name, machine) if each.label == "IQ2_M")
    assert 0.5 < row.share < 1
    assert row.share == pytest.approx(share, rel=0.01)
    assert row.speed == pytest.approx(1 / seconds, rel=0.01)


@pytest.mark.parametrize("name", ["HauhauCS/Qwen3.6-35B-A3B-Uncensored", "unsloth/GLM-5.3-Flash-GGUF"])
def test_the_sizes_of_other_files_are_near(name: str) -> None:
    shape, _, labels = REPOS[name]
    known = []
    for each in labels.values():
        head, size = shape.header(each * GB)
        known.append(weights_of([parse_head(Path("m"), head, size)], size))
    for one, other in permutations(known, 2):
        assert one.scaled(other.experts + other.rest).experts == pytest.approx(other.experts, rel=0.1)


def test_tables_of_which_a_token_needs_rows_take_no_memory() -> None:
    f16 = type_by_name("f16")
    names = [
        "blk.0.ffn_up_exps.weight",
        "blk.0.attn_q.weight",
        "token_embd.weight",
        "per_layer_token_embd.weight",
    ]

    def weights(*more: str) -> Weights:
        tensors = [(name, f16, (32, 2, 8), 1024 * i) for i, name in enumerate([*names, *more])]
        head = pack_header([array_entry("m.expert_used_count", GGUFValueType.INT32, [2])], tensors, 32)
        file = parse_head(Path("m"), head, len(head) + 1024 * len(tensors))
        assert file is not None
        return weights_of([file], 1024 * len(tensors))

    assert weights("output.weight") == Weights(1024, 2 * 1024, 256, 2 * 1024, 5 * 512)
    assert weights() == Weights(1024, 2 * 1024, 256, 1024, 4 * 512)  # tokens' rows are the output, too
    assert weights("output.weight").scaled(4 * 5 * 1024).table == 2 * 2 * 1024
    assert weights().scaled(0).speed(_machine(8)) > 1e9  # a size that is not announced


def test_of_files_that_cannot_be_better_the_smaller_is_taken() -> None:
    def choice(label: str, bits: float, speed: float) -> Choice:
        return Choice(label, int(bits * 1000), bits, 1.0, speed)

    small, q6, q8 = choice("Q4_0", 4.5, 30), choice("Q6_K", 6.6, 25), choice("Q8_0", 8.5, 20)
    bf16 = choice("BF16", 16, 11)
    assert best([small, q6, q8, bf16]) == q6
    assert best([q8, bf16]) == q8
    slow = [choice("Q2_K", 2.6, 1.5), choice("Q4_0", 4.5, 0.9)]
    assert best(slow) == slow[0]
    assert reason([*slow, choice("Q8_0", 8.5, 0)], _machine(8)) == (
        "Q2_K is the fastest, since none reaches 5 token/s with 6.7 GiB of memory and 2.8 GiB/s from the "
        "disk, by estimate: 1.5 token/s; more than 7.5 bits per weight are not recommended"
    )
    with pytest.raises(HobbitError, match="no QUANT fits into memory, not even Q8_0"):
        best([choice("Q8_0", 8.5, 0)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("u/empty", "u/empty holds no model: neither a GGUF file nor safetensors"),
        ("u/safe", "u/safe has no GGUF file; convert its checkpoint first with: pyhobbit convert -hf"),
        ("u/dense", "u/dense is dense, so all of it must fit into memory; it has Q4_0 .*, Q8_0 "),
        ("u/damaged", "M-Q4_0.gguf is not a GGUF file"),
        ("u/cut", "M-Q4_0.gguf of u/cut has no readable header"),
        ("u/torn", "u/torn lacks M-Q4_0-00002-of-00002.gguf"),
        ("u/gated", "u/gated is gated: accept its conditions"),
        ("u/none", "there is no .*/u/none, or it is private"),
    ],
)
def test_what_cannot_be_recommended_is_a_sentence(hub: Hub, name: str, message: str) -> None:
    with pytest.raises(HobbitError, match=message) as error:
        _choices(hub, name, _machine(8))
    assert "\n" not in str(error.value)


def test_without_a_network_it_is_a_sentence() -> None:
    said = r"127\.0\.0\.1:9 cannot be reached; check the network"
    with at("http://127.0.0.1:9"), pytest.raises(HobbitError, match=said):
        Repo("u/m").sizes()


def test_inspect_shows_the_choices_and_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    name = "HauhauCS/Qwen3.6-35B-A3B-Uncensored"
    (tmp_path / "pyhobbit-disk-speed").write_text("1000000000")
    done = hub.run(tmp_path, "inspect", name, "--memory", "24G", "--set", "disk_speed=3G")
    assert done.returncode == 0, done.stderr
    header, *rows, chosen = done.stdout.splitlines()
    assert header.split() == ["QUANT", "SIZE", "EXPERTS", "IN", "MEMORY", "TOKEN/S"]
    assert [row[2:].split()[0] for row in rows] == list(REPOS[name][2])
    (marked,) = (row for row in rows if row.startswith(">"))
    assert chosen.startswith(f"{marked[2:].split()[0]} is the best that reaches ")
    assert "24.0 GiB of memory and 3.0 GiB/s from the disk, by estimate" in chosen
    assert not list(tmp_path.rglob("*.gguf"))
    document = json.loads(hub.run(tmp_path, "inspect", name, "--json").stdout)
    assert [each["label"] for each in document["choices"]] == list(REPOS[name][2])
    assert document["machine"]["disk"] == 1e9
    none = hub.run(tmp_path, "inspect", "unsloth/Kimi-K3-GGUF", "--memory", "8G", "--set", "disk_speed=3G")
    assert none.returncode == 1
    assert none.stdout.count("no room") == 3
    assert "no QUANT fits into memory, not even UD-TQ1_0 with " in none.stderr
    assert "leave it out" in hub.run(tmp_path, "inspect", f"{name}:Q6_K", "--set", "disk_speed=3G").stderr


def test_pull_takes_what_is_recommended_or_there(tmp_path: Path) -> None:
    shape, files = Shape(2, 4, 2, 256 * 30_000, 256 * 1000), {}
    for label, share in (("Q4_K_M", 0.6), ("Q6_K", 0.8)):
        head, size = shape.header(share * (8 * shape.expert + shape.rest))
        files[f"M-{label}.gguf"] = head + bytes(size - len(head))
    with serving(
        Hub({"user/m": files, "user/dense": {"M-Q4_0.gguf": _dense(), "M-Q8_0.gguf": _dense()}})
    ) as hub:
        done = hub.run(tmp_path, "pull", "user/m")
        assert done.stdout.strip().endswith("M-Q6_K.gguf"), done.stderr
        assert done.stderr.startswith("pyhobbit: Q6_K is the best that reaches 5 token/s with ")
        assert float((tmp_path / "pyhobbit-disk-speed").read_text()) > 1e6
        assert hub.run(tmp_path, "rm", "user/m:Q6_K").returncode == 0
        assert hub.run(tmp_path, "pull", "user/m:Q4_K_M").returncode == 0
        hub.served.clear()
        again = hub.run(tmp_path, "pull", "user/m")
        assert again.stdout.strip().endswith("M-Q4_K_M.gguf")
        assert (again.stderr, hub.served) == ("", [])
        dense = hub.run(tmp_path, "pull", "user/dense")
        assert dense.stdout.strip().endswith("M-Q8_0.gguf")
        assert "user/dense is dense" in dense.stderr
