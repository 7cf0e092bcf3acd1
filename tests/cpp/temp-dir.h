// SPDX-License-Identifier: MIT
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

// A new folder, removed with everything in it at the end.
class temp_dir {
  public:
    temp_dir() {
        std::string name = (std::filesystem::temp_directory_path() / "hobbit-test-XXXXXX").string();
        if (!mkdtemp(name.data())) {
            throw std::runtime_error("cannot make a folder in " + name);
        }
        dir_ = name;
    }

    ~temp_dir() { std::filesystem::remove_all(dir_); }

    temp_dir(const temp_dir &)             = delete;
    temp_dir & operator=(const temp_dir &) = delete;

    std::string path(const std::string & name) const { return (dir_ / name).string(); }

    // Writes a file and returns its path.
    std::string write(const std::string & name, const std::string & bytes) const {
        std::filesystem::remove(path(name)); // some file systems flush a file that is truncated and written again
        std::ofstream out(path(name), std::ios::binary);
        out << bytes;
        return path(name);
    }

    static std::string read(const std::string & file) {
        std::ifstream in(file, std::ios::binary);
        return { std::istreambuf_iterator<char>(in), {} };
    }

  private:
    std::filesystem::path dir_;
};
