# SPDX-License-Identifier: MIT
"""llama.cpp's converter, for which the vocabulary of the test bed's checkpoints is a known one.

It stands in place of convert_hf_to_gguf.py, which knows vocabularies by their hash, and takes its arguments.
"""

import runpy
import sys

from pyhobbit.native.paths import VENDOR_DIR

sys.path.insert(0, str(VENDOR_DIR))

from conversion.base import TextModel

TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
runpy.run_path(str(VENDOR_DIR / "convert_hf_to_gguf.py"), run_name="__main__")
