# SPDX-License-Identifier: MIT
# How llama.cpp is built, patched and stock alike: comparisons between the two are then about the patches only.

if (NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

# RPC: devices of other machines. RDMA would depend on what the building machine has. There are thousands of warnings,
# which are upstream's. hobbit_use_ccache below does ccache for everything.
foreach(option IN ITEMS BUILD_SHARED_LIBS LLAMA_BUILD_COMMON LLAMA_BUILD_TOOLS LLAMA_BUILD_SERVER GGML_RPC)
    set(${option} ON)
endforeach()
foreach(option IN ITEMS LLAMA_BUILD_APP LLAMA_BUILD_EXAMPLES LLAMA_BUILD_TESTS LLAMA_BUILD_UI LLAMA_USE_PREBUILT_UI LLAMA_OPENSSL
        GGML_RPC_RDMA LLAMA_TOOLS_INSTALL LLAMA_ALL_WARNINGS GGML_ALL_WARNINGS GGML_CCACHE)
    set(${option} OFF)
endforeach()

set(HOBBIT_LLAMA_TOOLS llama-server llama-cli llama-quantize llama-perplexity llama-bench llama-imatrix ggml-rpc-server)

# llama.cpp asks git for its commit, and would be told ours: the tree lies in our checkout
file(STRINGS "${HOBBIT_LOCK}" HOBBIT_UPSTREAM REGEX "^upstream_commit")
string(REGEX REPLACE ".*= *" "" LLAMA_BUILD_COMMIT "${HOBBIT_UPSTREAM}")
set(ENV{GIT_CEILING_DIRECTORIES} "${LLAMA_CPP_DIR}/..")

# Object files are shared between the patched, the stock and other checkouts' build trees: ccache is told to look at
# paths relative to `root` and not at the build tree's own, and the trees keep the same distance to their sources.
function(hobbit_use_ccache root)
    find_program(HOBBIT_CCACHE ccache)
    if (HOBBIT_CCACHE)
        foreach(language C CXX)
            set(CMAKE_${language}_COMPILER_LAUNCHER
                "${CMAKE_COMMAND};-E;env;CCACHE_BASEDIR=${root};CCACHE_NOHASHDIR=1;${HOBBIT_CCACHE}" PARENT_SCOPE)
        endforeach()
    endif()
endfunction()

# Sets `out` to the libraries of the CPU: one, or with GGML_CPU_ALL_VARIANTS one for each generation of processors.
function(hobbit_cpu_libraries out)
    get_target_property(folder ggml-base SOURCE_DIR)
    get_directory_property(libraries DIRECTORY ${folder} BUILDSYSTEM_TARGETS)
    list(FILTER libraries INCLUDE REGEX "^ggml-cpu")
    list(FILTER libraries EXCLUDE REGEX "-feats$")
    set(${out} ${libraries} PARENT_SCOPE)
endfunction()

# Leaves out AMX: compilers take the stores of ggml's tile configuration for dead, and the first product of weights in
# AMX's layout ends the process (github.com/ggml-org/llama.cpp/pull/26954). The processors' generation with SME is compiled as
# the one before, where the compiler does not know SME (GCC before 14): ggml's own kernels do not use it. To be called when
# ggml-cpu is there, so that these flags come after -march=native.
function(hobbit_leave_out_extensions)
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag(-mno-amx-tile HOBBIT_KNOWS_AMX)
    check_cxx_compiler_flag(-march=armv9.2-a+sme HOBBIT_KNOWS_SME)
    hobbit_cpu_libraries(libraries)
    foreach(library IN LISTS libraries)
        if (HOBBIT_KNOWS_AMX)
            target_compile_options(${library} PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
        endif()
        get_target_property(options ${library} COMPILE_OPTIONS)
        if (NOT HOBBIT_KNOWS_SME AND options MATCHES "[+]sme")
            string(REGEX REPLACE "-march=armv9.2-a([a-z0-9+]*)[+]sme" "-march=armv8.6-a\\1" options "${options}")
            set_target_properties(${library} PROPERTIES COMPILE_OPTIONS "${options}")
        endif()
    endforeach()
endfunction()

# Compiles the target's sources of these names together, as llama.cpp itself does with its models.
function(hobbit_unite target names)
    get_target_property(others ${target} SOURCES)
    list(FILTER others EXCLUDE REGEX ${names})
    get_target_property(folder ${target} SOURCE_DIR)
    list(TRANSFORM others PREPEND "${folder}/")
    set_source_files_properties(${others} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
endfunction()

# Programs, which wait for ggml, are compiled fast: with less optimisation, and several sources together, as llama.cpp itself
# compiles its models. To be called when the targets are there.
function(hobbit_compile_programs_fast)
    foreach(target IN ITEMS llama-common server-context llama-server-impl llama-cli-impl cpp-httplib mtmd llama-bench-impl)
        target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
    endforeach()

    hobbit_unite(mtmd "models/")
    hobbit_unite(server-context ".")
    hobbit_unite(llama-server-impl ".")
    hobbit_unite(llama-common "^[^j]|json-") # neither json.cpp nor jinja/, which define the same names

    get_target_property(folder llama SOURCE_DIR)
    file(GLOB memories ${folder}/llama-kv-cache*.cpp ${folder}/llama-memory*.cpp)
    set_source_files_properties(${memories} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION OFF)

    # sources with patches alone, so that the others are the same objects in both trees
    file(GLOB patches ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../patches/*.patch)
    foreach(patch IN LISTS patches)
        file(STRINGS ${patch} patched REGEX "^[+][+][+] b/(common|src)/.*[.]cpp")
        list(TRANSFORM patched REPLACE ".* b" "${folder}/..")
        set_source_files_properties(${patched} TARGET_DIRECTORY llama llama-common PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endforeach()
endfunction()

# llama.cpp compiles its models in unity builds: sources that name each other by absolute paths would not be shared
set(CMAKE_UNITY_BUILD_RELOCATABLE ON)

# Adds our files of ggml: products of weights, and threads in libgomp's place. All sources get its flag, so that most objects are
# stock's. A file NAME-kernel.cpp defines the kernel NAME_kernel. To be called when ggml-cpu is there.
function(hobbit_add_cpu_files)
    set(ours ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../llama_ext/cpu)
    file(GLOB kernels CONFIGURE_DEPENDS ${ours}/*-kernel.cpp)
    list(TRANSFORM kernels REPLACE ".*/(.*)-kernel.cpp" "KERNEL(\\1_kernel)" OUTPUT_VARIABLE names)
    string(REPLACE ";" " " names "${names}")
    hobbit_cpu_libraries(libraries)
    get_target_property(folder ggml-base SOURCE_DIR)
    set(cpu ${folder}/ggml-cpu)
    foreach(library IN LISTS libraries)
        set_source_files_properties(${cpu}/ggml-cpu.cpp TARGET_DIRECTORY ${library} PROPERTIES COMPILE_OPTIONS "-include;plain-rows.h")
        set_source_files_properties(${cpu}/ops.cpp TARGET_DIRECTORY ${library} PROPERTIES COMPILE_OPTIONS "-include;attention.h")
        set_source_files_properties(${cpu}/arch/x86/quants.c TARGET_DIRECTORY ${library}
            PROPERTIES COMPILE_DEFINITIONS quantize_row_q8_K=quantize_row_q8_K_plain)
        target_sources(${library} PRIVATE ${kernels} ${ours}/plain-rows.cpp ${ours}/q8_k-rows.cpp ${ours}/attention.cpp
            ${ours}/attention-tiles.cpp ${ours}/barriers.cpp)
        target_include_directories(${library} PRIVATE ${ours})
        set_source_files_properties(${ours}/plain-rows.cpp TARGET_DIRECTORY ${library}
            PROPERTIES COMPILE_DEFINITIONS "PLAIN_KERNELS=${names}")
        if (CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_C_COMPILER_ID STREQUAL "GNU") # the team sleeps by futex
            target_sources(${library} PRIVATE ${ours}/thread-team.cpp)
            target_compile_options(${library} PRIVATE -fopenmp)
            set_source_files_properties(${cpu}/ggml-cpu.c TARGET_DIRECTORY ${library} PROPERTIES COMPILE_DEFINITIONS GGML_USE_OPENMP)
        endif()
    endforeach()
    set_source_files_properties(${folder}/ggml-backend.cpp ${folder}/ggml-backend-reg.cpp ${folder}/ggml-rpc/transport.cpp
        TARGET_DIRECTORY ggml-base ggml-rpc PROPERTIES COMPILE_OPTIONS "-include;${ours}/../base/ggml-hooks.h")
endfunction()

# Adds hobbit-wall.h to a library, for the functions that these headers and sources declare.
function(hobbit_add_wall library)
    foreach(header IN LISTS ARGN)
        file(READ ${header} text)
        string(REGEX MATCHALL "\n[^/\n]*_API (DEPRECATED.)?[^;(]*[ *](llama|mtmd|hobbit)_[a-z0-9_]+ *[(]" found "${text}")
        list(TRANSFORM found REPLACE ".*[ *]([a-z0-9_]+) *[(]" "WALLED(\\1)" OUTPUT_VARIABLE found)
        list(JOIN found " " found)
        string(APPEND names " ${found}")
        string(APPEND code "#include \"${header}\"\n")
    endforeach()
    set(source ${CMAKE_CURRENT_BINARY_DIR}/hobbit-wall-${library}.cpp)
    file(CONFIGURE OUTPUT ${source} CONTENT "${code}#define HOBBIT_WALLED ${names}\n#include \"hobbit-wall.h\"\n")
    target_sources(${library} PRIVATE ${source})
    set_source_files_properties(${source} TARGET_DIRECTORY ${library}
        PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON COMPILE_OPTIONS -Wno-deprecated-declarations)
endfunction()

# Adds the files of ours that the patches call. To be called when ggml-hobbit is there.
function(hobbit_add_our_files)
    set(root ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
    set(bridge ${root}/llama_ext/bridge)
    set(server ${root}/llama_ext/server)
    set(plan ${root}/llama_ext/plan)
    get_target_property(src llama SOURCE_DIR)
    set(sources ${bridge}/llama-hobbit.cpp ${plan}/llama-plan.cpp)
    set_source_files_properties(${src}/llama.cpp ${src}/llama-model.cpp ${src}/llama-model-loader.cpp ${src}/llama-graph.cpp
        ${src}/llama-context.cpp ${src}/llama-quant.cpp TARGET_DIRECTORY llama PROPERTIES COMPILE_OPTIONS "-include;llama-hobbit.h")
    target_sources(llama PRIVATE ${sources})
    set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES
        SKIP_UNITY_BUILD_INCLUSION ON INCLUDE_DIRECTORIES $<TARGET_PROPERTY:ggml-base,SOURCE_DIR>)
    target_include_directories(llama PUBLIC ${bridge} ${plan})
    target_link_libraries(llama PRIVATE ggml-hobbit)
    # llama_hobbit_guard throws through them
    target_compile_options(ggml-base PRIVATE $<$<COMPILE_LANGUAGE:C>:-fexceptions> $<$<C_COMPILER_ID:GNU>:-fopenmp>)

    get_target_property(mtmd mtmd SOURCE_DIR)
    hobbit_add_wall(llama ${mtmd}/../../include/llama.h ${bridge}/llama-expert-cache.h ${plan}/llama-plan.h)
    hobbit_add_wall(mtmd ${mtmd}/mtmd.h ${mtmd}/mtmd-helper.h ${bridge}/hobbit-projector.cpp)
    hobbit_add_wall(llama-common ${bridge}/hobbit-chat.cpp)

    file(GLOB_RECURSE hooks CONFIGURE_DEPENDS ${server}/server-*.cpp) # each defines server_hooks_NAME
    list(REMOVE_ITEM hooks ${server}/server-hooks.cpp)
    list(TRANSFORM hooks REPLACE ".*/server-(.*).cpp" "HOOKS(\\1)" OUTPUT_VARIABLE names)
    list(REMOVE_ITEM names HOOKS\(requests\)) # first: it ends answers that others then wrap
    list(JOIN names " " names)
    target_sources(server-context PRIVATE ${hooks} ${server}/server-hooks.cpp ${server}/ollama-body.cpp)
    set_source_files_properties(${server}/server-hooks.cpp TARGET_DIRECTORY server-context
        PROPERTIES COMPILE_DEFINITIONS "SERVER_HOOKS=HOOKS(requests) ${names}")
    target_include_directories(server-context PUBLIC ${server})
    target_link_libraries(server-context PUBLIC ggml-hobbit cpp-httplib)

    hobbit_add_cpu_files()

    if (TARGET ggml-vulkan)
        target_compile_options(ggml-vulkan PRIVATE "SHELL:-include ${root}/patches/vulkan/older-headers.h")
    endif()
endfunction()
