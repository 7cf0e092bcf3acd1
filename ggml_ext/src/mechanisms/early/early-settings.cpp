// SPDX-License-Identifier: MIT
#include "mechanisms/early/early-settings.h" // the table of settings lists this file's objects
