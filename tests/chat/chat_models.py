# SPDX-License-Identifier: MIT
"""Models for the tests of chat."""

from pathlib import Path

from gguf import GGUFReader, GGUFWriter

# What the tiny model was trained on is Python: turns as comments are the closest to a conversation.
COMMENT_TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def write_with_template(source: Path, path: Path, template: str = COMMENT_TEMPLATE) -> None:
    """Copies a GGUF and gives it a chat template."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, value.contents(), value.types[0], value.types[-1])
    writer.data_alignment = reader.alignment
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
