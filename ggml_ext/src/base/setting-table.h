// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit.h"

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace hobbit {

// A number (a flag is 0 or 1), or a text.
using setting_value = std::variant<double, std::string>;

// Settings that a model file, its sidecar or its calibration stores, by key. A later value of a key overrides an
// earlier one.
using stored_settings = std::vector<std::pair<std::string, setting_value>>;

// The first rows of the table, which calls `rows` when it is first read. Returns true, for initializers of static
// objects. REQUIRES: called before the table is read
bool register_first_settings(std::function<std::vector<hobbit_setting_spec>()> rows);

// Returns true. REQUIRES: as above
bool register_paper(const hobbit_paper & paper);

// The whole table, in the order of the documents. Constant; valid for ever.
const std::vector<hobbit_setting_spec> & setting_table();

// Null for an unknown key.
const hobbit_setting_spec * find_setting(const std::string & key);

bool is_text(const hobbit_setting_spec & spec);

// The value of every setting and its source. Invariant: each value lies in the range or among the choices of its row.
// Thread-safety: that of a std::map.
class setting_values {
  public:
    struct entry {
        setting_value         value; // value of the row's type; 0 or "" if there is none
        bool                  has_value = false;
        hobbit_setting_source source    = HOBBIT_SOURCE_DEFAULT;
        std::string           note; // why it has this value
    };

    // All defaults.
    setting_values();

    // Fails for an unknown key, a value of the wrong type, and one outside the range or the choices of the row.
    status set(const std::string & key, const setting_value & value, hobbit_setting_source source,
               const std::string & note = "");

    // Applies the caller's setting. Fails as set() does.
    status give(const hobbit_setting & setting);

    void note(const std::string & key, const std::string & note) { entries_[key].note = note; }

    // Takes a text away. REQUIRES: the key of a text without a default
    void clear(const std::string & key) { entries_[key] = { std::string(), false, HOBBIT_SOURCE_COMPUTED, "" }; }

    // REQUIRES: a key of the table
    const entry & at(const std::string & key) const { return entries_.at(key); }

    double number(const std::string & key) const { return std::get<double>(at(key).value); }

    const std::string & text(const std::string & key) const { return std::get<std::string>(at(key).value); }

    bool is_given(const std::string & key) const { return at(key).source == HOBBIT_SOURCE_GIVEN; }

    // Returns true if one of the keys, which are separated by spaces, is given.
    bool any_given(const char * keys) const;

  private:
    std::map<std::string, entry> entries_; // [key]
};

// Fails with what the user can do. Called for values other than the default, once the layers are placed. is_apart: a
// device with memory of its own computes experts.
using setting_check = status (*)(const setting_values & values, bool is_apart);

// Adds a number or flag of a mechanism, which no file stores, behind the first rows in the order of keys. The check may
// be null. Returns true. REQUIRES: as register_first_settings
bool register_setting(const hobbit_setting_spec & row, setting_check fails = nullptr);

// The first check of a mechanism's setting that fails.
status check_registered_settings(const setting_values & values, bool is_apart);

// Returns the index of `name` among the words in `words`, or -1.
int find_word(const char * words, const std::string & name);

} // namespace hobbit
