// SPDX-License-Identifier: MIT
#include "mechanisms/replacement/replacement-settings.h" // the table of settings lists this file's objects
