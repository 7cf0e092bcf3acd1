# SPDX-License-Identifier: MIT
# Content of the wheel.

# Installs libraries to lib/, programs to bin/ and the extension module to the package itself.
function(hobbit_install_binaries package module)
    set(libraries ggml-hobbit llama llama-common mtmd)
    foreach(program IN LISTS ARGN)
        if (TARGET ${program}-impl)
            list(APPEND libraries ${program}-impl)
        endif()
    endforeach()
    get_target_property(folder ggml-base SOURCE_DIR)
    get_directory_property(backends DIRECTORY ${folder} SUBDIRECTORIES)
    foreach(each IN LISTS folder backends)
        get_directory_property(targets DIRECTORY ${each} BUILDSYSTEM_TARGETS)
        foreach(target IN LISTS targets)
            get_target_property(type ${target} TYPE)
            if (type MATCHES "^(SHARED|MODULE)_LIBRARY$")
                list(APPEND libraries ${target})
            endif()
        endforeach()
    endforeach()
    if (NOT HOBBIT_KNOWS_SME) # armv9 then equals the generation before
        list(FILTER libraries EXCLUDE REGEX "^ggml-cpu-armv9")
    endif()
    # Wheels hold no symbolic links. Without a version, file name and SONAME are the same.
    foreach(library IN LISTS libraries)
        foreach(property VERSION SOVERSION PUBLIC_HEADER PRIVATE_HEADER)
            set_property(TARGET ${library} PROPERTY ${property})
        endforeach()
    endforeach()
    # CMake itself leaves out the folder of a CUDA toolkit that lies nowhere where the system looks
    set_target_properties(${libraries} PROPERTIES INSTALL_RPATH "$ORIGIN;${CMAKE_BUILD_RPATH}")
    set_target_properties(${ARGN} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
    set_target_properties(${module} PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
    # RPATH in place of RUNPATH, which LD_LIBRARY_PATH overrides: another llama.cpp's libraries have the same names
    foreach(target IN LISTS libraries ARGN module)
        target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
    endforeach()
    # the vendored folder's targets are not part of `all`
    add_custom_target(pyhobbit-binaries ALL DEPENDS ${libraries} ${ARGN} ${module})
    install(TARGETS ${libraries} LIBRARY DESTINATION ${package}/lib)
    install(TARGETS ${ARGN} RUNTIME DESTINATION ${package}/bin)
    install(TARGETS ${module} LIBRARY DESTINATION ${package})
endfunction()

# Lets llama-cpp-python find our libraries, whichever of the two packages is imported first.
function(hobbit_install_llama_cpp_hook)
    set(files ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/site-packages)
    install(FILES ${files}/pyhobbit-llama-cpp.pth ${files}/_pyhobbit_llama_cpp.py DESTINATION .)
endfunction()

# Installs llama.cpp's converter, which `pyhobbit convert` runs on Hugging Face checkpoints, and the licences of what
# the libraries contain (NOTICE names them all).
function(hobbit_install_vendored package tree)
    install(FILES ${tree}/convert_hf_to_gguf.py DESTINATION ${package}/vendor)
    install(DIRECTORY ${tree}/conversion DESTINATION ${package}/vendor FILES_MATCHING PATTERN "*.py")
    install(DIRECTORY ${tree}/gguf-py/gguf DESTINATION ${package}/vendor/gguf-py FILES_MATCHING PATTERN "*.py")
    set(licences ${package}/licenses)
    install(FILES ${tree}/LICENSE DESTINATION ${licences} RENAME LICENSE-llama.cpp)
    install(FILES ${tree}/licenses/LICENSE-jsonhpp DESTINATION ${licences})
    install(FILES ${tree}/gguf-py/LICENSE DESTINATION ${licences} RENAME LICENSE-gguf)
    install(FILES ${tree}/vendor/cpp-httplib/LICENSE DESTINATION ${licences} RENAME LICENSE-cpp-httplib)
    foreach(hash rotate-bits/LICENSE.md sha256/LICENSE xxhash/LICENSE)
        get_filename_component(name ${hash} DIRECTORY)
        install(FILES ${tree}/vendor/hash/${hash} DESTINATION ${licences} RENAME LICENSE-${name})
    endforeach()
endfunction()

# Installs llama-cpp-python's modules, which lie in the same source distribution as llama.cpp.
function(hobbit_install_bindings package sdist)
    set(folder ${CMAKE_CURRENT_BINARY_DIR}/bindings)
    file(ARCHIVE_EXTRACT INPUT ${sdist} DESTINATION ${folder} PATTERNS "*/llama_cpp/*.py" "*/LICENSE.md")
    file(GLOB root ${folder}/llama_cpp_python-*)
    install(DIRECTORY ${root}/llama_cpp DESTINATION ${package}/vendor FILES_MATCHING PATTERN "*.py")
    install(FILES ${root}/LICENSE.md DESTINATION ${package}/licenses RENAME LICENSE-llama-cpp-python)
endfunction()
