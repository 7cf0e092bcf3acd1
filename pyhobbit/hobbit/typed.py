# SPDX-License-Identifier: MIT
"""llama_cpp.Llama with types that say what comes back: an answer, or with stream=True an iterator.

For type checkers alone; when the program runs, TypedLlama is Llama.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from pyhobbit.native import ffi

if TYPE_CHECKING:
    from llama_cpp import ChatCompletionRequestMessage, Llama
    from llama_cpp.llama_types import (
        CreateChatCompletionResponse,
        CreateChatCompletionStreamResponse,
        CreateCompletionResponse,
        CreateCompletionStreamResponse,
    )

    class TypedLlama(Llama):
        @overload  # type: ignore[override]
        def create_completion(
            self, prompt: str | list[int], suffix: str | None = ..., *, stream: Literal[True], **options: Any
        ) -> Iterator[CreateCompletionStreamResponse]: ...
        @overload
        def create_completion(
            self, prompt: str | list[int], suffix: str | None = ..., **options: Any
        ) -> CreateCompletionResponse: ...
        def create_completion(self, *_arguments: Any, **_options: Any) -> Any: ...

        @overload  # type: ignore[override]
        def __call__(
            self, prompt: str, suffix: str | None = ..., *, stream: Literal[True], **options: Any
        ) -> Iterator[CreateCompletionStreamResponse]: ...
        @overload
        def __call__(
            self, prompt: str, suffix: str | None = ..., **options: Any
        ) -> CreateCompletionResponse: ...
        def __call__(self, *_arguments: Any, **_options: Any) -> Any: ...

        @overload  # type: ignore[override]
        def create_chat_completion(
            self, messages: Sequence[ChatCompletionRequestMessage], *, stream: Literal[True], **options: Any
        ) -> Iterator[CreateChatCompletionStreamResponse]: ...
        @overload
        def create_chat_completion(
            self, messages: Sequence[ChatCompletionRequestMessage], **options: Any
        ) -> CreateChatCompletionResponse: ...
        def create_chat_completion(self, *_arguments: Any, **_options: Any) -> Any: ...

else:
    TypedLlama = ffi.llama.Llama
