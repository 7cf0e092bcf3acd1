// SPDX-License-Identifier: MIT
//
// llama.cpp's chat templates and its parsers of answers as functions of C, for Python: what llama-server does with a
// conversation. Strings are UTF-8 and end with a zero. A function that fails throws. Not thread-safe; different chats
// may be used in different threads.
#include "chat.h"
#include "llama.h"
#include "log.h"

#include <stdexcept>
#include <string>

struct hobbit_chat {
    const llama_model *       model;
    std::string               source;
    common_chat_templates_ptr templates; // made by the first call
    common_chat_parser_params parser;    // parser parameters of the last prompt
    std::string               answer;    // JSON of the last call
};

static common_chat_templates_ptr parse(const hobbit_chat & chat) {
    try {
        return common_chat_templates_init(chat.model, chat.source);
    } catch (const std::exception &) { // its text is only logged
        throw std::runtime_error("it is not valid Jinja");
    }
}

extern "C" {

// The model must outlive the chat. The first call says what is wrong with the template.
LLAMA_API hobbit_chat * hobbit_chat_new(const llama_model * model, const char * chat_template) {
    common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT); // errors are returned, not logged
    return new hobbit_chat{ model, chat_template, {}, {}, {} };
}

LLAMA_API void hobbit_chat_free(hobbit_chat * chat) {
    delete chat;
}

// The prompt of a conversation as JSON, valid until the next call. `messages` is OpenAI's array in JSON.
//   prompt:           text
//   preserved_tokens: control tokens that the parser needs as text
//   stops:            texts that end the answer
//   thinks:           whether the template knows of thinking
LLAMA_API const char * hobbit_chat_render(hobbit_chat * chat, const char * messages, bool enable_thinking) {
    if (!chat->templates) {
        chat->templates = parse(*chat);
    }
    common_chat_templates_inputs inputs;
    inputs.messages         = common_chat_msgs_parse_oaicompat(common_json::parse(messages));
    inputs.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK; // apart from the content, as the server does
    inputs.enable_thinking  = enable_thinking;

    const common_chat_params params = common_chat_templates_apply(chat->templates.get(), inputs);

    chat->parser                  = common_chat_parser_params(params);
    chat->parser.reasoning_format = inputs.reasoning_format;
    if (!params.parser.empty()) {
        chat->parser.parser.load(params.parser);
    }
    const common_json answer = {
        { "prompt", params.prompt },
        { "preserved_tokens", params.preserved_tokens },
        { "stops", params.additional_stops },
        { "thinks", params.supports_thinking },
    };
    chat->answer = answer.dump();
    return chat->answer.c_str();
}

// The content and the thinking of an answer to the last prompt as JSON, valid until the next call. A partial answer
// gives what is certain so far. REQUIRES: hobbit_chat_render() has succeeded.
LLAMA_API const char * hobbit_chat_parse(hobbit_chat * chat, const char * answer, bool is_partial) {
    const common_chat_msg msg = common_chat_parse(answer, is_partial, chat->parser);
    chat->answer = common_json{ { "content", msg.render_content() }, { "thinking", msg.reasoning_content } }.dump();
    return chat->answer.c_str();
}
}
