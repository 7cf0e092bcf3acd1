// SPDX-License-Identifier: MIT
#include "model/gguf-file.h"

#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "hobbit.h"

#include <doctest/doctest.h>
#include <filesystem>
#include <string>
#include <vector>

using namespace hobbit;

static bool contains(const status & s, const std::string & text) {
    return s.message().find(text) != std::string::npos;
}

TEST_CASE("the table says where each tensor's bytes lie") {
    for (const uint32_t alignment : { 32, 4096 }) {
        CAPTURE(alignment);
        temp_dir     dir;
        gguf_builder built(alignment);
        built.add("first", GGML_TYPE_F32, 3, 2, 1); // 24 bytes: the next begins after padding
        built.add("second", GGML_TYPE_Q4_0, 64, 5, 3);
        const std::string path = built.write(dir.path("model.gguf"));

        gguf_file file;
        REQUIRE(file.open(path).ok());
        const std::string bytes = temp_dir::read(path);
        CHECK(file.path() == path);
        CHECK(file.size() == bytes.size());
        REQUIRE(file.tensors().size() == 2);
        for (const gguf_file::tensor & t : file.tensors()) {
            CHECK(t.offset % alignment == 0);
            CHECK(bytes.substr(t.offset, t.size) == built.data(t.name));
        }
        const gguf_file::tensor & second = file.tensors()[1];
        CHECK(second.type == GGML_TYPE_Q4_0);
        CHECK(second.ne[0] == 64);
        CHECK(second.ne[1] == 5);
        CHECK(second.ne[2] == 3);
    }
}

TEST_CASE("numbers of every width are found, and the largest of an array") {
    temp_dir     dir;
    gguf_builder built;
    gguf_set_val_u8(built.keys(), "u8", 200);
    gguf_set_val_i8(built.keys(), "i8", -3);
    gguf_set_val_u16(built.keys(), "u16", 60000);
    gguf_set_val_i16(built.keys(), "i16", -300);
    gguf_set_val_u32(built.keys(), "u32", 4000000000u);
    gguf_set_val_i32(built.keys(), "i32", -7);
    gguf_set_val_u64(built.keys(), "u64", uint64_t(1) << 63);
    gguf_set_val_i64(built.keys(), "i64", -9);
    gguf_set_val_f32(built.keys(), "f32", 0.5f);
    gguf_set_val_f64(built.keys(), "f64", 0.25);
    gguf_set_val_bool(built.keys(), "bool", true);
    built.set_ints("ints", { 3, 8, -1 });
    gguf_file file;
    REQUIRE(file.open(built.write(dir.path("model.gguf"))).ok());

    const auto number = [&](const char * key) {
        double value = -1;
        CHECK(file.find_number(key, value));
        return value;
    };
    CHECK(number("u8") == 200);
    CHECK(number("i8") == -3);
    CHECK(number("u16") == 60000);
    CHECK(number("i16") == -300);
    CHECK(number("u32") == 4000000000.0);
    CHECK(number("i32") == -7);
    CHECK(number("u64") == 9223372036854775808.0);
    CHECK(number("i64") == -9);
    CHECK(number("f32") == 0.5);
    CHECK(number("f64") == 0.25);
    CHECK(number("bool") == 1);
    CHECK(number("ints") == 8);
}

TEST_CASE("a key is found only as what it is") {
    temp_dir     dir;
    gguf_builder built;
    gguf_set_val_str(built.keys(), "text", "seven");
    gguf_set_val_u64(built.keys(), "u64", 7);
    built.set_strings("texts", { "a", "b" });
    built.set_ints("ints", { 1, 2 });
    built.set_ints("none", {});
    gguf_file file;
    REQUIRE(file.open(built.write(dir.path("model.gguf"))).ok());

    double                        number = 0;
    uint64_t                      u64    = 0;
    std::string                   text;
    std::vector<std::string_view> texts;
    std::vector<int32_t>          ints;
    CHECK(file.has("text"));
    CHECK_FALSE(file.has("tex"));
    CHECK_FALSE(file.find_number("text", number));
    CHECK_FALSE(file.find_number("texts", number));
    CHECK_FALSE(file.find_number("none", number));
    CHECK_FALSE(file.find_number("absent", number));

    CHECK(file.find_u64("u64", u64));
    CHECK(u64 == 7);
    CHECK_FALSE(file.find_u64("text", u64));
    CHECK_FALSE(file.find_u64("absent", u64));

    CHECK(file.find_string("text", text));
    CHECK(text == "seven");
    CHECK_FALSE(file.find_string("u64", text));
    CHECK_FALSE(file.find_string("texts", text));

    CHECK(file.find_strings("texts", texts));
    CHECK(texts == std::vector<std::string_view>{ "a", "b" });
    CHECK_FALSE(file.find_strings("ints", texts));
    CHECK_FALSE(file.find_strings("text", texts));

    CHECK(file.find_array("ints", ints));
    CHECK(ints == std::vector<int32_t>{ 1, 2 });
    CHECK_FALSE(file.find_array("texts", ints));
    CHECK_FALSE(file.find_array("u64", ints));
    CHECK(file.find_array("none", ints));
    CHECK(ints.empty());
}

TEST_CASE("a file that is missing, no GGUF, or cut short is an error") {
    temp_dir     dir;
    gguf_builder built;
    built.add("tensor", GGML_TYPE_F32, 64, 4, 4);
    const std::string path  = built.write(dir.path("model.gguf"));
    const std::string bytes = temp_dir::read(path);
    gguf_file         file;
    SUBCASE("missing") {
        const status s = file.open(dir.path("nowhere.gguf"));
        CHECK(contains(s, "cannot open"));
        CHECK(contains(s, "nowhere.gguf"));
    }
    SUBCASE("a folder") {
        CHECK_FALSE(file.open(dir.path("")).ok());
    }
    SUBCASE("another format") {
        CHECK(contains(file.open(dir.write("text.gguf", "not a model")), "text.gguf is not a GGUF file"));
    }
    SUBCASE("empty") {
        CHECK(contains(file.open(dir.write("empty.gguf", "")), "empty.gguf is empty"));
    }
    SUBCASE("cut in the header") {
        CHECK(contains(file.open(dir.write("cut.gguf", bytes.substr(0, 40))), "ends in the middle of its header"));
    }
    SUBCASE("cut in the data") {
        const status s = file.open(dir.write("cut.gguf", bytes.substr(0, bytes.size() - 1)));
        CHECK(contains(s, "is truncated: tensor 'tensor' ends at byte"));
        CHECK(contains(s, std::to_string(bytes.size() - 1)));
    }
    SUBCASE("cut anywhere") {
        for (size_t size = 0; size < bytes.size(); size += 3) {
            CHECK_FALSE(gguf_file().open(dir.write("cut.gguf", bytes.substr(0, size))).ok());
        }
    }
}

//
// tensors that cannot be
//

static std::string number(uint64_t value, size_t width) {
    return { reinterpret_cast<const char *>(&value), width };
}

static std::string described(const std::string & name, const std::vector<uint64_t> & ne, uint64_t offset) {
    std::string bytes = number(name.size(), 8) + name + number(ne.size(), 4);
    for (const uint64_t n : ne) {
        bytes += number(n, 8);
    }
    return bytes + number(GGML_TYPE_F32, 4) + number(offset, 8);
}

// The error of a file with these descriptions and a kilobyte of data.
static std::string error_of(const std::vector<std::string> & tensors) {
    temp_dir    dir;
    std::string bytes = "GGUF" + number(3, 4) + number(tensors.size(), 8) + number(0, 8);
    for (const std::string & tensor : tensors) {
        bytes += tensor;
    }
    gguf_file file;
    return file.open(dir.write("m.gguf", bytes + std::string(1024, 0))).message();
}

TEST_CASE("a type that only another program knows, or that ggml has removed, is no damage") {
    for (const char type : { char(139), char(4) }) {
        std::string tensor         = described("t", { 32 }, 0);
        tensor[tensor.size() - 12] = type;
        const std::string said     = error_of({ tensor });
        CHECK(said.find("its 't' has the type " + std::to_string(uint8_t(type))) != std::string::npos);
        CHECK(said.find("damaged") == std::string::npos);
    }
}

TEST_CASE("the first bytes of a file are enough, and what ends too early is told from damage") {
    const std::string tensors = described("a", { 32 }, 0) + described("b", { 32 }, 128);
    const std::string header  = "GGUF" + number(3, 4) + number(2, 8) + number(0, 8) + tensors;
    for (size_t size = 4; size <= header.size(); size++) {
        gguf_file    file;
        const status s = file.open("m", std::string_view(header).substr(0, size), 4096);
        CHECK((s.ok() ? file.tensors().size() == 2 : s.reason() == HOBBIT_HEADER_CUT));
        CHECK(s.ok() == (size == header.size()));
    }
    std::string damaged  = header;
    damaged[24 + 8 + 1]  = 5; // more dimensions than there are
    const status refused = gguf_file().open("m", damaged, 4096);
    CHECK(contains(refused, "damaged"));
    CHECK(refused.reason() == HOBBIT_HEADER_REFUSED);
}

TEST_CASE("dimensions of 0 and huge ones are an error, also side by side") {
    const uint64_t huge   = uint64_t(1) << 62;
    const auto     is_bad = [](const std::vector<uint64_t> & ne) {
        return error_of({ described("t", ne, 0) }).find("GGUF") != std::string::npos ||
               error_of({ described("t", ne, 0) }).find("damaged") != std::string::npos;
    };
    CHECK(error_of({ described("t", { 32, 2 }, 0) }).empty());
    CHECK(error_of({ described("t", { 32, 0 }, 0) }).find("tensor 't' has a dimension of 0") != std::string::npos);
    CHECK(is_bad({ 0, huge }));
    CHECK(is_bad({ huge, 0, huge }));
    CHECK(is_bad({ huge, huge }));
    CHECK(is_bad({ 32, uint64_t(1) << 63 }));
    CHECK(is_bad({ uint64_t(1) << 32, uint64_t(1) << 32, 1 }));
}

TEST_CASE("tensors that overlap, leave a gap or end behind the file are an error") {
    const auto two = [](uint64_t first, uint64_t second) {
        return error_of({ described("a", { 32 }, first), described("b", { 32 }, second) });
    };
    CHECK(two(0, 128).empty());
    for (const auto & [first, second] : { std::pair(0, 0), std::pair(0, 64), std::pair(128, 0), std::pair(0, 256) }) {
        CHECK(two(uint64_t(first), uint64_t(second)) != "");
    }
    CHECK(two(0, ~uint64_t(0) - 31) != "");
    CHECK(error_of({ described("a", { 32, 1024 }, 0) }).find("is truncated") != std::string::npos);
}

//
// split models
//

// Writes part `number` of `count`, with one tensor.
static std::string write_part(const temp_dir & dir, uint16_t number, uint16_t count, const std::string & name) {
    gguf_builder built;
    gguf_set_val_u16(built.keys(), "split.no", number);
    gguf_set_val_u16(built.keys(), "split.count", count);
    built.add("tensor" + std::to_string(number), GGML_TYPE_F32, 32, 1, 1);
    return built.write(dir.path(name));
}

TEST_CASE("the first part of a split model brings the others, in order") {
    temp_dir          dir;
    const std::string first = write_part(dir, 0, 3, "m-00001-of-00003.gguf");
    write_part(dir, 1, 3, "m-00002-of-00003.gguf");
    write_part(dir, 2, 3, "m-00003-of-00003.gguf");
    std::vector<gguf_file> files;
    REQUIRE(open_gguf_model(first, files).ok());
    REQUIRE(files.size() == 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK(files[i].tensors()[0].name == "tensor" + std::to_string(i));
    }
}

TEST_CASE("links to the first part lead to the others") {
    temp_dir          dir;
    const std::string first = write_part(dir, 0, 2, "m-00001-of-00002.gguf");
    write_part(dir, 1, 2, "m-00002-of-00002.gguf");
    std::filesystem::create_directories(dir.path("blobs"));
    std::filesystem::create_directories(dir.path("snapshot"));
    std::vector<gguf_file> files;
    const auto             link = [&](const std::string & target, const std::string & name) {
        std::filesystem::create_symlink(target, dir.path(name));
        return dir.path(name);
    };

    SUBCASE("under any name, over several links") {
        link("m-00001-of-00002.gguf", "q.gguf");
        CHECK(first_part(link("../q.gguf", "snapshot/r.gguf")) == dir.path("snapshot/../m-00001-of-00002.gguf"));
        REQUIRE(open_gguf_model(dir.path("snapshot/r.gguf"), files).ok());
        CHECK(files.size() == 2);
    }
    SUBCASE("named like the first part of a model that lies elsewhere") {
        CHECK(first_part(link(first, "snapshot/m-00001-of-00002.gguf")) == first);
        CHECK(first_part(link(first, "snapshot/other-00001-of-00009.gguf")) == first);
    }
    SUBCASE("to a link, beside which the others lie as links to files without a name") {
        std::filesystem::rename(first, dir.path("blobs/a"));
        std::filesystem::rename(dir.path("m-00002-of-00002.gguf"), dir.path("blobs/b"));
        const std::string cached = link("../blobs/a", "snapshot/m-00001-of-00002.gguf");
        link("../blobs/b", "snapshot/m-00002-of-00002.gguf");
        CHECK(first_part(cached) == cached);
        CHECK(first_part(link(cached, "q.gguf")) == cached);
        REQUIRE(open_gguf_model(dir.path("q.gguf"), files).ok());
        CHECK(files.size() == 2);
    }
    SUBCASE("whose second part is missing, or that go round in a circle") {
        std::filesystem::remove(dir.path("m-00002-of-00002.gguf"));
        CHECK(contains(open_gguf_model(link(first, "q.gguf"), files), "m-00002-of-00002.gguf"));
        link("b.gguf", "a.gguf");
        CHECK(first_part(link("a.gguf", "b.gguf")) == dir.path("b.gguf"));
    }
}

TEST_CASE("a single file is a model of one part") {
    temp_dir               dir;
    std::vector<gguf_file> files;
    REQUIRE(open_gguf_model(write_part(dir, 0, 1, "m.gguf"), files).ok());
    CHECK(files.size() == 1);
}

TEST_CASE("a split model that cannot be complete is an error") {
    temp_dir               dir;
    std::vector<gguf_file> files;
    SUBCASE("another part than the first") {
        const status s = open_gguf_model(write_part(dir, 1, 2, "m-00002-of-00002.gguf"), files);
        CHECK(contains(s, "is part 2 of a split model: give its first part"));
    }
    SUBCASE("a part is missing") {
        const status s = open_gguf_model(write_part(dir, 0, 2, "m-00001-of-00002.gguf"), files);
        CHECK(contains(s, "cannot open"));
        CHECK(contains(s, "m-00002-of-00002.gguf"));
    }
    SUBCASE("a part is a link to the first") {
        const std::string first = write_part(dir, 0, 2, "m-00001-of-00002.gguf");
        std::filesystem::create_symlink(first, dir.path("m-00002-of-00002.gguf"));
        CHECK(contains(open_gguf_model(first, files), "is not part 2 of the model"));
    }
    SUBCASE("more parts than there are files") {
        const status s = open_gguf_model(write_part(dir, 0, 65535, "m-00001-of-65535.gguf"), files);
        CHECK(contains(s, "cannot open"));
    }
    SUBCASE("renamed") {
        const status s = open_gguf_model(write_part(dir, 0, 2, "renamed.gguf"), files);
        CHECK(contains(s, "is not named like one (NAME-00001-of-00002.gguf)"));
    }
    SUBCASE("a number of parts that is none") {
        gguf_builder built;
        gguf_set_val_f32(built.keys(), "split.count", -1.0f);
        CHECK(contains(open_gguf_model(built.write(dir.path("m.gguf")), files), "claims to be split into -1 parts"));
    }
}
