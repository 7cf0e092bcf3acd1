// SPDX-License-Identifier: MIT
#include "server-hooks.h"

#include <sys/socket.h>

#include <atomic>
#include <cstdlib>

namespace {

// Tells the socket HOBBIT_BUSY_SOCKET, where there is one, whether the server computes: the program behind it
// calibrates the model meanwhile.
class idle_hooks : public server_hooks {
  public:
    void busy(bool is_busy) override {
        static const char *      number = std::getenv("HOBBIT_BUSY_SOCKET");
        static std::atomic<bool> said{ true };
        if (number && said.exchange(is_busy) != is_busy) {
            send(std::atoi(number), is_busy ? "1" : "0", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        }
    }
};

} // namespace

server_hooks & server_hooks_idle() {
    static idle_hooks hooks;
    return hooks;
}
