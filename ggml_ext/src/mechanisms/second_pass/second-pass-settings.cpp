// SPDX-License-Identifier: MIT
#include "mechanisms/second_pass/second-pass-settings.h" // the table of settings lists this file's objects
