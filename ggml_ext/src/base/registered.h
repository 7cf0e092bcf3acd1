// SPDX-License-Identifier: MIT
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace hobbit {

struct no_traits {};

// The maker of one kind of objects, under a name. Makers are objects of static storage, each in the file of what it
// makes, so that another file adds a name without a change elsewhere. Traits tell what callers must know of a name.
//
// Thread-safety: constant once main() runs.
template <typename Made, typename Options, typename Traits = no_traits>
class registered {
  public:
    using make_function = std::unique_ptr<Made> (*)(const Options &);

    registered(const char * name, make_function maker, const Traits & known = {}) { table()[name] = { maker, known }; }

    // The maker of a class that is constructed from the options.
    template <typename T>
    static registered of(const char * name, const Traits & known = {}) {
        return { name, [](const Options & options) -> std::unique_ptr<Made> { return std::make_unique<T>(options); },
                 known };
    }

    // Null if options.name is unknown.
    static std::unique_ptr<Made> make(const Options & options) {
        const auto found = table().find(options.name);
        return found == table().end() ? nullptr : found->second.make(options);
    }

    // Defaults if the name is unknown.
    static Traits traits(const std::string & name) {
        const auto found = table().find(name);
        return found == table().end() ? Traits() : found->second.traits;
    }

    // All registered names, in alphabetical order.
    static std::vector<std::string> names() {
        std::vector<std::string> all;
        for (const auto & each : table()) {
            all.push_back(each.first);
        }
        return all;
    }

  private:
    struct entry {
        make_function make = nullptr;
        Traits        traits;
    };

    // A function, so that it exists before the first maker.
    static std::map<std::string, entry> & table() {
        static std::map<std::string, entry> entries;
        return entries;
    }
};

} // namespace hobbit
