# How a module, a program, a test executable and a fuzz target are declared.
# Sources are found by folder: src/NAME/*.cc belongs to module NAME (not its subfolders).

add_library(spin_flags INTERFACE)
set(spin_warnings -Wall -Wextra -Wshadow -Wnon-virtual-dtor $<$<BOOL:${SPIN_WERROR}>:-Werror>)
# nvcc's own stubs do not pass the strict set.
target_compile_options(spin_flags INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:${spin_warnings}>"
                       $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)
target_include_directories(spin_flags INTERFACE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  target_compile_options(spin_flags INTERFACE -Wthread-safety -Wno-unused-private-field)
endif()
if(SPIN_SANITIZE)
  string(REPLACE ";" "," spin_sanitize_list "${SPIN_SANITIZE}")
  target_compile_options(spin_flags INTERFACE -fsanitize=${spin_sanitize_list}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(spin_flags INTERFACE -fsanitize=${spin_sanitize_list})
  # The standard library's own assertions ride along with every sanitizer build.
  target_compile_definitions(spin_flags INTERFACE _GLIBCXX_ASSERTIONS
                             SPIN_SANITIZED=1)
endif()
if(SPIN_FUZZ)
  target_compile_options(spin_flags INTERFACE -fsanitize=fuzzer-no-link,address,undefined
                         -fno-sanitize-recover=all)
  target_link_options(spin_flags INTERFACE -fsanitize=address,undefined)
  target_compile_definitions(spin_flags INTERFACE _GLIBCXX_ASSERTIONS SPIN_SANITIZED=1)
endif()

find_program(SPIN_CCACHE ccache)
if(SPIN_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${SPIN_CCACHE})
endif()
find_program(SPIN_MOLD mold)
if(SPIN_MOLD AND NOT CMAKE_CROSSCOMPILING)
  add_link_options(-fuse-ld=mold)
endif()

# spin_module(PATH [DEPS modules...] [LIBS public...] [PRIVATE_LIBS ...])
# PATH is the folder under src/; the target is spin_<path with / as _>.
function(spin_module path)
  cmake_parse_arguments(ARG "" "" "DEPS;LIBS;PRIVATE_LIBS" ${ARGN})
  string(REPLACE "/" "_" name ${path})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${path}/*.cc
       ${CMAKE_SOURCE_DIR}/src/${path}/*.cu)
  list(TRANSFORM ARG_DEPS PREPEND spin_)
  if(sources)
    add_library(spin_${name} STATIC ${sources})
    target_link_libraries(spin_${name} PUBLIC spin_flags ${ARG_DEPS} ${ARG_LIBS}
                          PRIVATE ${ARG_PRIVATE_LIBS})
  else()  # headers only
    add_library(spin_${name} INTERFACE)
    target_link_libraries(spin_${name} INTERFACE spin_flags ${ARG_DEPS} ${ARG_LIBS})
  endif()
endfunction()

# spin_program(NAME FOLDER folder MODULES modules... [LIBS ...])
# FOLDER/main.cc is the program; the other sources are the library spin_FOLDER, which tests link too.
function(spin_program name)
  cmake_parse_arguments(ARG "" "FOLDER" "MODULES;LIBS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${ARG_FOLDER}/*.cc)
  list(FILTER sources EXCLUDE REGEX "/main\\.cc$")
  if(NOT sources)
    return()
  endif()
  list(TRANSFORM ARG_MODULES PREPEND spin_)
  add_library(spin_${ARG_FOLDER} STATIC ${sources})
  target_include_directories(spin_${ARG_FOLDER} PUBLIC ${CMAKE_SOURCE_DIR})
  target_link_libraries(spin_${ARG_FOLDER} PUBLIC ${ARG_MODULES} PRIVATE ${ARG_LIBS})
  add_executable(${name} ${CMAKE_SOURCE_DIR}/${ARG_FOLDER}/main.cc)
  target_link_libraries(${name} PRIVATE spin_${ARG_FOLDER})
  install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endfunction()

# spin_test(FOLDER [LABEL label] [MODULES ...] [LIBS ...]): tests/FOLDER/*_test.cc as one executable.
# LABEL (unit): which of the lanes runs it.
function(spin_test folder)
  cmake_parse_arguments(ARG "" "LABEL" "MODULES;LIBS" ${ARGN})
  if(NOT ARG_LABEL)
    set(ARG_LABEL unit)
  endif()
  string(REPLACE "/" "_" name ${folder})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/${folder}/*.cc)
  if(NOT sources)
    return()
  endif()
  list(TRANSFORM ARG_MODULES PREPEND spin_)
  add_executable(spin_${name}_tests ${sources})
  target_include_directories(spin_${name}_tests PRIVATE ${CMAKE_SOURCE_DIR})
  target_compile_definitions(spin_${name}_tests PRIVATE
                             SPIN_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/data"
                             SPIN_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  target_link_libraries(spin_${name}_tests PRIVATE ${ARG_MODULES} ${ARG_LIBS} spin_test_support
                        GTest::gmock GTest::gtest_main)
  include(GoogleTest)
  gtest_discover_tests(spin_${name}_tests DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS "${ARG_LABEL};${name}" TIMEOUT 300)
endfunction()

# spin_fuzzer(NAME MODULES ...): fuzz/NAME_fuzzer.cc.
function(spin_fuzzer name)
  cmake_parse_arguments(ARG "" "" "MODULES;LIBS" ${ARGN})
  if(NOT EXISTS ${CMAKE_SOURCE_DIR}/fuzz/${name}_fuzzer.cc)
    return()
  endif()
  list(TRANSFORM ARG_MODULES PREPEND spin_)
  add_executable(${name}_fuzzer ${CMAKE_SOURCE_DIR}/fuzz/${name}_fuzzer.cc)
  target_include_directories(${name}_fuzzer PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name}_fuzzer PRIVATE ${ARG_MODULES} ${ARG_LIBS})
  target_link_options(${name}_fuzzer PRIVATE -fsanitize=fuzzer)
endfunction()
