# SPDX-License-Identifier: MIT
# Toolchain of `make wheel`: Debian's GCC with the libraries that deploy/sysroot has put into HOBBIT_SYSROOT. With HOBBIT_CROSS,
# a processor's name as `uname -m` prints it, it is the GCC for that, and qemu-user runs what the build itself starts.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HOBBIT_SYSROOT HOBBIT_CROSS)
if (HOBBIT_CROSS)
    unset(ENV{_PYTHON_HOST_PLATFORM}) # names the wheel; pip, which runs here, would take it for this machine
    set(CMAKE_SYSTEM_NAME Linux)
    set(CMAKE_SYSTEM_PROCESSOR ${HOBBIT_CROSS})
    set(CMAKE_C_COMPILER ${HOBBIT_CROSS}-linux-gnu-gcc)
    set(CMAKE_CXX_COMPILER ${HOBBIT_CROSS}-linux-gnu-g++)
    set(CMAKE_CROSSCOMPILING_EMULATOR qemu-${HOBBIT_CROSS}-static -L ${HOBBIT_SYSROOT})
    set(headers ${HOBBIT_SYSROOT}/usr/include)
    set(CMAKE_C_FLAGS_INIT "-nostdinc -isystem ${headers}/gcc-cross -isystem ${headers}/${HOBBIT_CROSS}-linux-gnu -isystem ${headers}")
    set(CMAKE_CXX_FLAGS_INIT
        "-nostdinc++ -isystem ${headers}/c++/cross -isystem ${headers}/c++/cross/${HOBBIT_CROSS}-linux-gnu ${CMAKE_C_FLAGS_INIT}")
    set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
    set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
endif()
set(CMAKE_SYSROOT ${HOBBIT_SYSROOT})
file(GLOB folders ${CMAKE_SYSROOT}/lib/*-linux-gnu ${CMAKE_SYSROOT}/usr/lib/*-linux-gnu)
list(TRANSFORM folders PREPEND "-B") # they precede the compiler's own libraries
list(PREPEND folders --sysroot=${CMAKE_SYSROOT}) # CMake tells it to GCC alone, and not to nvcc
set(CMAKE_CUDA_FLAGS_INIT -Xcompiler=--sysroot=${CMAKE_SYSROOT})
list(JOIN folders " " folders)
foreach(kind EXE SHARED MODULE)
    set(CMAKE_${kind}_LINKER_FLAGS_INIT "${folders}")
endforeach()
