// SPDX-License-Identifier: MIT
#include "hobbit-chat.h"

#include "chat.h"
#include "log.h"

#include <stdexcept>
#include <string>

struct hobbit_chat {
    const llama_model *       model;
    std::string               source;
    common_chat_templates_ptr templates; // made by the first call
    common_chat_parser_params parser;    // parser parameters of the last prompt
    std::string               answer;    // answer of the last call
    std::string               error;
};

// Runs fn, which returns JSON; its exceptions become the error.
template <typename F>
static const char * call(hobbit_chat * chat, F fn) {
    try {
        chat->answer = fn().dump();
        return chat->answer.c_str();
    } catch (const std::exception & e) {
        chat->error = e.what();
        return nullptr;
    }
}

static common_chat_templates_ptr parse(const hobbit_chat & chat) {
    try {
        return common_chat_templates_init(chat.model, chat.source);
    } catch (const std::exception &) { // its text is only logged
        throw std::runtime_error("it is not valid Jinja");
    }
}

hobbit_chat * hobbit_chat_new(const llama_model * model, const char * chat_template) {
    common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT); // errors are returned, not logged
    return new hobbit_chat{ model, chat_template, {}, {}, {}, {} };
}

void hobbit_chat_free(hobbit_chat * chat) {
    delete chat;
}

const char * hobbit_chat_error(const hobbit_chat * chat) {
    return chat->error.c_str();
}

const char * hobbit_chat_render(hobbit_chat * chat, const char * messages, bool enable_thinking) {
    return call(chat, [&] {
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
        return common_json{
            { "prompt", params.prompt },
            { "preserved_tokens", params.preserved_tokens },
            { "stops", params.additional_stops },
            { "thinks", params.supports_thinking },
        };
    });
}

const char * hobbit_chat_parse(hobbit_chat * chat, const char * answer, bool is_partial) {
    return call(chat, [&] {
        const common_chat_msg msg = common_chat_parse(answer, is_partial, chat->parser);
        return common_json{
            { "content", msg.render_content() },
            { "thinking", msg.reasoning_content },
        };
    });
}
