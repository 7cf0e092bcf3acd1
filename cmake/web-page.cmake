# SPDX-License-Identifier: MIT
# llama-server's web page: built by npm, which downloads what it needs. Without it the server has its API alone.

option(HOBBIT_WEB_PAGE "Build llama-server's web page where npm is present" ON)

find_program(HOBBIT_NPM npm)
if (HOBBIT_WEB_PAGE AND HOBBIT_NPM)
    set(LLAMA_BUILD_UI ON)
    message(STATUS "llama-server: with its web page")
elseif (HOBBIT_WEB_PAGE)
    message(STATUS "llama-server: without its web page, since npm is missing (Debian: apt-get install npm)")
endif()
