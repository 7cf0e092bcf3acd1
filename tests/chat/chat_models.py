# SPDX-License-Identifier: MIT
"""Models for the tests of chat."""

from pathlib import Path

from models import copy_gguf

# The tiny model was trained on Python: turns as comments are the closest to a conversation.
COMMENT_TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def write_with_template(source: Path, path: Path, template: str = COMMENT_TEMPLATE) -> None:
    """Copies a GGUF and gives it a chat template."""
    copy_gguf(source, path, template)
