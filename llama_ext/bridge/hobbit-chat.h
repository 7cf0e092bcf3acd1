// SPDX-License-Identifier: MIT
#pragma once

// llama.cpp's chat templates and its parsers of answers as functions of C, for Python: what llama-server does with a
// conversation. Strings are UTF-8 and end with a zero. A function that fails returns null, and hobbit_chat_error() says
// why. Not thread-safe; different chats may be used in different threads.

struct llama_model;

extern "C" {

struct hobbit_chat;

// The model must outlive the chat. Never null: the first call says what is wrong with the template.
hobbit_chat * hobbit_chat_new(const llama_model * model, const char * chat_template);
void          hobbit_chat_free(hobbit_chat * chat);

// Why the last call failed.
const char * hobbit_chat_error(const hobbit_chat * chat);

// The prompt of a conversation as JSON, valid until the next call. `messages` is OpenAI's array in JSON.
//   prompt:           text
//   preserved_tokens: control tokens that the parser needs as text
//   stops:            texts that end the answer
//   thinks:           whether the template knows of thinking
const char * hobbit_chat_render(hobbit_chat * chat, const char * messages, bool enable_thinking);

// The content and the thinking of an answer to the last prompt as JSON, valid until the next call. A partial answer
// gives what is certain so far. REQUIRES: hobbit_chat_render() has succeeded.
const char * hobbit_chat_parse(hobbit_chat * chat, const char * answer, bool is_partial);
}
