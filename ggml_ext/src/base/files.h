// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace hobbit {

// A text that a run writes. An incomplete file is removed.
//
// Thread-safety: none.
class text_file {
  public:
    ~text_file() { close(); }

    // Replaces an older file that begins with `begin` too; any other one is an error, since its data would be lost.
    // `kind` names the file in errors and has static storage. REQUIRES: not open
    status open(const std::string & path, const char * kind, const std::string & begin);

    bool is_open() const { return file_.is_open(); }

    const std::string & path() const { return path_; }
    const status &      error() const { return error_; } // the first one

    // Buffered: a full disk may cause an error in a later call. All calls return the first error. REQUIRES: open
    status append(const char * text, size_t size);

    // Makes every later call return the error, if it is the first one.
    status fail(const status & error);

    // Hands all data to the operating system, or returns the first error. A no-op if not open.
    status close();

  private:
    status fail(int error);

    std::string       path_;
    const char *      kind_ = nullptr;
    std::vector<char> buffer_; // the file's
    std::ofstream     file_;
    status            error_;
};

// Raises the process's soft limit of open files so that `n` more can be opened, as far as its hard limit allows.
void allow_open_files(uint64_t n);

// The reason `error` (of errno) why a file could not be opened, and what helps against too many open files.
std::string open_failure(int error);

} // namespace hobbit
