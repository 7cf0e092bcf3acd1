// SPDX-License-Identifier: MIT
#include "base/setting-table.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>

namespace hobbit {

namespace {

using checked_row = std::pair<hobbit_setting_spec, setting_check>;

struct registrations {
    std::function<std::vector<hobbit_setting_spec>()> first;
    std::map<std::string, checked_row>                others; // [key]
    std::map<std::string, hobbit_paper>               papers; // [name]
};

} // namespace

// A function, so that they exist before the first setting.
static registrations & all_registrations() {
    static registrations all;
    return all;
}

bool register_first_settings(std::function<std::vector<hobbit_setting_spec>()> rows) {
    all_registrations().first = std::move(rows);
    return true;
}

bool register_paper(const hobbit_paper & paper) {
    all_registrations().papers[paper.name] = paper;
    return true;
}

static std::vector<hobbit_setting_spec> collect_rows() {
    std::vector<hobbit_setting_spec> rows = all_registrations().first();
    for (const auto & each : all_registrations().others) {
        rows.push_back(each.second.first);
    }
    return rows;
}

const std::vector<hobbit_setting_spec> & setting_table() {
    static const std::vector<hobbit_setting_spec> rows = collect_rows();
    return rows;
}

const hobbit_setting_spec * find_setting(const std::string & key) {
    const auto & rows  = setting_table();
    const auto   found = std::find_if(rows.begin(), rows.end(), [&](const auto & row) { return key == row.key; });
    return found == rows.end() ? nullptr : &*found;
}

bool is_text(const hobbit_setting_spec & spec) {
    return spec.type == HOBBIT_TYPE_CHOICE || spec.type == HOBBIT_TYPE_TEXT || spec.type == HOBBIT_TYPE_PATH;
}

int find_word(const char * words, const std::string & name) {
    const std::string all = std::string(" ") + words + " ";
    const size_t      at  = name.find(' ') == std::string::npos ? all.find(" " + name + " ") : std::string::npos;
    return at == std::string::npos ? -1 : int(std::count(all.begin(), all.begin() + long(at), ' '));
}

static status check_value(const hobbit_setting_spec & spec, const setting_value & value) {
    if (std::holds_alternative<std::string>(value)) {
        const std::string & text = std::get<std::string>(value);
        if (!is_text(spec)) {
            return status::error("%s takes a number, not the text '%s'", spec.key, text.c_str());
        }
        return !spec.choices || find_word(spec.choices, text) >= 0
                   ? status()
                   : status::error("%s is '%s': choose one of %s", spec.key, text.c_str(), spec.choices);
    }
    const double number = std::get<double>(value);
    if (is_text(spec)) {
        return status::error("%s takes a text", spec.key);
    }
    const bool is_in = spec.type == HOBBIT_TYPE_FLAG || (number >= spec.min && number <= spec.max);
    return std::isfinite(number) && is_in
               ? status()
               : status::error("%s is %g: it must lie between %g and %g", spec.key, number, spec.min, spec.max);
}

setting_values::setting_values() {
    for (const hobbit_setting_spec & spec : setting_table()) {
        entry & e = entries_[spec.key];
        e.value   = is_text(spec) ? setting_value(std::string()) : setting_value(0.0);
        e.source  = HOBBIT_SOURCE_COMPUTED;
        if (const char * text = spec.default_value) {
            const setting_value value = is_text(spec) ? setting_value(text) : setting_value(std::strtod(text, nullptr));
            GGML_ASSERT(set(spec.key, value, HOBBIT_SOURCE_DEFAULT).ok());
        }
    }
}

status setting_values::set(const std::string & key, const setting_value & value, hobbit_setting_source source,
                           const std::string & note) {
    const hobbit_setting_spec * row = find_setting(key);
    if (!row) {
        return status::error("unknown setting %s", key.c_str());
    }
    HOBBIT_TRY(check_value(*row, value));
    entry & e = entries_[key];
    e         = { value, true, source, note };
    if (row->type == HOBBIT_TYPE_FLAG) {
        e.value = std::get<double>(value) != 0 ? 1.0 : 0.0;
    }
    return {};
}

status setting_values::give(const hobbit_setting & setting) {
    if (!setting.key) {
        return status::error("a setting has no key: give one");
    }
    return set(setting.key, setting.text ? setting_value(setting.text) : setting_value(setting.number),
               HOBBIT_SOURCE_GIVEN);
}

bool setting_values::any_given(const char * keys) const {
    return keys && std::any_of(entries_.begin(), entries_.end(), [&](const auto & each) {
               return each.second.source == HOBBIT_SOURCE_GIVEN && find_word(keys, each.first) >= 0;
           });
}

bool register_setting(const hobbit_setting_spec & row, setting_check fails) {
    all_registrations().others[row.key] = { row, fails };
    return true;
}

status check_registered_settings(const setting_values & values, bool is_apart) {
    for (const auto & [key, row] : all_registrations().others) {
        if (row.second && values.number(key) != std::strtod(row.first.default_value, nullptr)) {
            HOBBIT_TRY(row.second(values, is_apart));
        }
    }
    return {};
}

} // namespace hobbit

const struct hobbit_setting_spec * hobbit_setting_spec_at(size_t i) {
    const auto & rows = hobbit::setting_table();
    return i < rows.size() ? &rows[i] : nullptr;
}

const struct hobbit_paper * hobbit_paper_at(size_t i) {
    const auto & papers = hobbit::all_registrations().papers;
    return i < papers.size() ? &std::next(papers.begin(), ptrdiff_t(i))->second : nullptr;
}
