// What the engine uses of Apple's header of this name, for `make portability` on other systems.
#pragma once
#include <cstddef>
extern "C" int sysctlbyname(const char *name, void *value, size_t *size, void *to, size_t to_size);
