# SPDX-License-Identifier: MIT
"""The projector (mmproj) of a model that sees: what it takes of memory, and images in a prompt."""

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyhobbit.engine.chat_format import IMAGE_MARKER
from pyhobbit.engine.closing import Closing
from pyhobbit.engine.llama import Context, Model, log, opening
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import multimodal, projector_sizes
from pyhobbit.native.machine import trimmed_heap
from pyhobbit.settings.config import EngineConfig

_SIMULATED = EngineConfig(n_ctx=32)
_LIBRARY_BYTES = 12 << 20  # libmtmd, its threads and a prepared picture, beside any projector


def projector_bytes(model: Path, projector: Path) -> int:
    """Bytes of this process that the projector needs, with an image of the usual size; loads nothing.

    A larger image may take more. Raises HobbitError where the model cannot have it.
    """
    _check_file(projector)
    with opening, trimmed_heap(), Session(model, {}, one_sequence(_SIMULATED), simulated=True) as session:
        multimodal().mtmd_helper_log_set(log.callback, None)
        log.start(False)
        n_bytes, n_embd = projector_sizes(bytes(projector))
        if not n_bytes:
            raise _unfit(projector, model, log.reason() or "it holds no projector")
        if n_embd != session.model.n_embd_inputs():
            reason = f"it makes {n_embd} numbers of a part of an image, the model takes another number"
            raise _unfit(projector, model, reason)
    return n_bytes + _LIBRARY_BYTES


class Projector(Closing):
    """An open one. Not thread-safe.  model: must outlive it.  Raises HobbitError.

    Each token of a picture has the same number below 0, so that the same picture at the same place of the
    prompt's pictures is known again. It is a pyhobbit.engine.llama.Images.
    """

    def __init__(self, path: Path, model: Model, n_threads: int) -> None:
        self._mtmd = multimodal()
        _check_file(path)
        self._mtmd.mtmd_helper_log_set(log.callback, None)
        params = self._mtmd.mtmd_context_params_default()
        params.warmup, params.print_timings, params.n_threads = False, False, n_threads
        params.media_marker = IMAGE_MARKER.encode()
        self._pointer = self._mtmd.mtmd_init_from_file(bytes(path), model.pointer, params)
        if not self._pointer:
            raise _unfit(path, model.path, log.reason())
        self._numbers: dict[tuple[bytes, int], int] = {}  # by picture, and by its part among the prompt's
        self._chunks: Any = None  # chunks of the last prompt
        self._media: dict[int, Any] = {}  # the pictures among these, by number
        if not self._mtmd.mtmd_support_vision(self._pointer):
            self.close()
            raise HobbitError(f"{path} does not see images; give the projector that does")

    def close(self) -> None:
        """Frees it; the second call does nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._forget()
            self._mtmd.mtmd_free(pointer)

    def check(self, image: str) -> None:
        """Raises HobbitError where the file is no image."""
        with self._bitmap(image):
            pass

    def tokenize(self, text: str, images: Sequence[str]) -> list[int]:
        """Tokens of a prompt with an IMAGE_MARKER for each of these files. Raises HobbitError.

        compute() then takes the numbers of its pictures, until the next call.
        """
        mtmd = self._mtmd
        data = text.encode("utf-8", "surrogateescape")
        given = mtmd.mtmd_input_text(text=data, text_len=len(data), add_special=True, parse_special=True)
        with ExitStack() as stack:
            bitmaps = [stack.enter_context(self._bitmap(image)) for image in images]
            array = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
            self._forget()
            self._chunks = mtmd.mtmd_input_chunks_init()
            log.start(log.verbose)
            status = mtmd.mtmd_tokenize(self._pointer, self._chunks, ctypes.byref(given), array, len(bitmaps))
        if status == 1:
            raise HobbitError("the model's chat template has no place for images; ask without one")
        if status != 0:
            raise HobbitError(f"the images cannot be prepared: {log.reason() or 'llama.cpp gave no reason'}")
        tokens = list(self._tokens())
        if tokens and tokens[-1] < 0:
            raise HobbitError("the prompt ends with an image; add a question behind it")
        return tokens

    def compute(self, number: int, context: Context) -> tuple[int, int]:
        """As Images.compute()."""
        mtmd, chunk = self._mtmd, self._media[number]
        n_tokens = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if mtmd.mtmd_decode_use_non_causal(self._pointer, chunk) and n_tokens > context.n_ubatch:
            raise HobbitError(
                f"the image has {n_tokens} tokens, which this model reads in one pass, and a pass has "
                f"{context.n_ubatch}; use --batch {n_tokens}"
            )
        end = ctypes.c_int32(0)
        status = mtmd.mtmd_helper_eval_chunk_single(
            self._pointer, context.pointer, chunk, context.position, 0, context.n_ubatch, False,
            ctypes.byref(end),
        )  # fmt: skip
        return status, mtmd.mtmd_input_chunk_get_n_pos(chunk)

    def _tokens(self) -> Iterator[int]:
        mtmd, parts = self._mtmd, Counter[bytes]()
        for i in range(mtmd.mtmd_input_chunks_size(self._chunks)):
            chunk = mtmd.mtmd_input_chunks_get(self._chunks, i)
            n_tokens = ctypes.c_size_t(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n_tokens))
                yield from tokens[: n_tokens.value]
                continue
            picture = mtmd.mtmd_input_chunk_get_id(chunk) or b""
            number = self._numbers.setdefault((picture, parts[picture]), -1 - len(self._numbers))
            parts[picture] += 1
            self._media[number] = chunk
            yield from [number] * n_tokens.value

    def _forget(self) -> None:
        self._media.clear()
        if self._chunks is not None:
            self._mtmd.mtmd_input_chunks_free(self._chunks)
            self._chunks = None

    @contextmanager
    def _bitmap(self, image: str) -> Iterator[Any]:
        path, mtmd = Path(image), self._mtmd
        try:
            data = path.read_bytes()
        except OSError as e:
            raise HobbitError(f"{image} cannot be read: {e.strerror}") from e
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        made = mtmd.mtmd_helper_bitmap_init_from_buf_wrapper(
            self._pointer, buffer, len(data), False, mtmd.mtmd_helper_init_opt_default()
        )
        try:
            if not made.bitmap or made.video_ctx or mtmd.mtmd_bitmap_is_audio(made.bitmap):
                raise HobbitError(f"{image} is not an image that llama.cpp can read; give a JPEG or PNG file")
            yield made.bitmap
        finally:
            if made.bitmap:
                mtmd.mtmd_bitmap_free(made.bitmap)
            if made.video_ctx:
                mtmd.mtmd_helper_video_free(made.video_ctx)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise HobbitError(f"there is no file {path}; --mmproj takes the model's projector, a GGUF file")


def _unfit(path: Path, model: Path, reason: str | None) -> HobbitError:
    why = reason or "llama.cpp gave no reason"
    return HobbitError(f"{path} cannot be loaded: {why}; give the projector that comes with {model.name}")
