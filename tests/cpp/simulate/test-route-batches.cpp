// SPDX-License-Identifier: MIT
#include "simulate/route-batches.h"

#include "fixtures/routes.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <map>
#include <string>
#include <vector>

using namespace hobbit;

static std::vector<route_batch> batches(const route_list & routes, uint32_t n_layers) {
    std::vector<route_batch> found;
    const status             s = find_batches(routes.data(), routes.size(), options("lru", n_layers, 26, 1, 1), found);
    REQUIRE_MESSAGE(s.ok(), s.message());
    return found;
}

TEST_CASE("batches end where the layer goes back") {
    route_list routes; // a prompt of three tokens, of which the last layer computes one, and two decoded tokens
    for (int32_t layer = 0; layer < 3; layer++) {
        for (int32_t token = layer == 2 ? 2 : 0; token < 3; token++) {
            routes.push_back({ 0, token, layer, 0, 1.0f, 0 });
        }
    }
    for (int32_t token = 3; token < 5; token++) {
        for (int32_t layer = 0; layer < 3; layer++) {
            routes.push_back({ 0, token, layer, 0, 1.0f, 1 });
        }
    }
    const auto found = batches(routes, 3);
    REQUIRE(found.size() == 3);
    CHECK(found[0].first == 0);
    CHECK(found[0].last == 7);
    CHECK(found[0].n_tokens.at(0) == 3);
    CHECK(found[0].n_counted == 0);
    CHECK(found[0].begins == std::vector<int32_t>{ 0 });
    CHECK(found[1].n_counted == 1);
    CHECK(found[1].begins.empty());
    CHECK(found[2].last == routes.size());
}

TEST_CASE("with one layer, decoded tokens of one sequence are batches of their own") {
    CHECK(batches(letters("abcABC"), 1).size() == 4);
    CHECK(batches(letters("A", 0) + letters("B", 1) + letters("C", 0, 1), 1).size() == 2);
}

using numbers = std::map<int32_t, uint32_t>;

TEST_CASE("the number of a sequence is free again when it has ended") {
    const auto found = batches(letters("AB", 7) + letters("AB", 9) + letters("A", 5) + letters("B", 9, 2), 1);
    REQUIRE(found.size() == 4);
    CHECK(found[0].numbers == numbers{ { 7, 0 } });
    CHECK(found[1].numbers == numbers{ { 7, 0 }, { 9, 1 } });
    CHECK(found[2].numbers == numbers{ { 5, 0 }, { 9, 1 } });
    CHECK(found[3].numbers == numbers{ { 9, 1 } });
}

static std::string error(const route_list & routes, const hobbit_simulation & o) {
    std::vector<route_batch> found;
    return find_batches(routes.data(), routes.size(), o, found).message();
}

TEST_CASE("routes that cannot be are refused") {
    const hobbit_simulation o     = options("lru", 2, 4, 2, 2);
    const route_list        right = {
        { 0, 0, 0, 1, 0.5f, 1 }, { 0, 0, 0, 2, 0.5f, 1 }, { 0, 0, 1, 1, 0.5f, 1 }, { 0, 0, 1, 2, 0.5f, 1 },
        { 0, 1, 0, 1, 0.5f, 1 }, { 0, 1, 0, 2, 0.5f, 1 }, { 0, 1, 1, 1, 0.5f, 1 }, { 0, 1, 1, 2, 0.5f, 1 },
    };
    CHECK(error(right, o) == "");
    const auto with = [&](auto change) {
        route_list routes = right;
        change(routes);
        return error(routes, o);
    };
    CHECK(contains(with([](auto & r) { r[2].layer = r[3].layer = 2; }), "route 2 (sequence 0, token 0, layer 2)"));
    CHECK(contains(with([](auto & r) { r[0].layer = r[1].layer = -1; }), "the model has 2 layers"));
    CHECK(contains(with([](auto & r) { r[5].expert = 4; }), "there is no expert 4 among 4"));
    CHECK(contains(with([](auto & r) { r[5].expert = -1; }), "there is no expert -1"));
    CHECK(contains(with([](auto & r) { r[1].expert = 1; }), "expert 1 appears twice"));
    CHECK(contains(with([](auto & r) { r.pop_back(); }), "has 1 routes in a layer, not 2"));
    CHECK(contains(with([](auto & r) { r[1].token = 1; }), "has 1 routes in a layer, not 2"));
    CHECK(contains(with([](auto & r) { std::rotate(r.begin(), r.begin() + 4, r.end()); }), "goes backwards"));
    CHECK(contains(with([](auto & r) { std::rotate(r.begin(), r.begin() + 2, r.begin() + 4); }), "goes backwards"));
    CHECK(contains(with([](auto & r) { r[1].counted = 0; }), "has 1 routes in a layer, not 2"));
    CHECK(contains(with([](auto & r) { std::copy(r.begin(), r.begin() + 4, r.begin() + 4); }), "goes backwards"));
}

TEST_CASE("tokens of a batch are in order within each layer") {
    hobbit_simulation o      = options("lru", 2, 4, 1, 2);
    route_list        routes = {
        { 0, 0, 0, 1, 1.0f, 0 }, { 0, 1, 0, 1, 1.0f, 0 }, { 0, 0, 1, 1, 1.0f, 0 }, { 0, 1, 1, 1, 1.0f, 0 }
    };
    CHECK(error(routes, o) == "");
    std::swap(routes[2], routes[3]);
    CHECK(contains(error(routes, o), "route 3 (sequence 0, token 0, layer 1): the order goes backwards"));
}
