# The CUDA kernels of libflashsdpa.so: added to the target `flashsdpa` wherever nvcc is found; no GPU is needed.
# Without nvcc the library holds the CPU kernels alone. The compile options are those of src/cuda/nvcc_options.txt, which
# tools/ptxas_gate.py reads too. Never -rdc: ptxas then ignores setmaxnreg and serialises wgmma.
option(FLASHSDPA_CUDA "Build the CUDA kernels where nvcc is found" ON)
if(NOT FLASHSDPA_CUDA)
  return()
endif()

include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # the options file names the one target
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "nvcc not found: building the CPU kernels alone")
  return()
endif()
enable_language(CUDA)
message(STATUS "CUDA kernels: nvcc ${CMAKE_CUDA_COMPILER_VERSION}")

set(cuda_options ${PROJECT_SOURCE_DIR}/src/cuda/nvcc_options.txt)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
set_source_files_properties(${cuda_sources} PROPERTIES COMPILE_OPTIONS "--options-file;${cuda_options}"
                                                       OBJECT_DEPENDS ${cuda_options})
target_sources(flashsdpa PRIVATE ${cuda_sources})
target_compile_definitions(flashsdpa PRIVATE FLASHSDPA_HAVE_CUDA FLASHSDPA_CUDA_VERSION=${CMAKE_CUDA_COMPILER_VERSION})
set_target_properties(flashsdpa PROPERTIES
  CUDA_ARCHITECTURES OFF
  CUDA_RUNTIME_LIBRARY Static
  CUDA_COMPILER_LAUNCHER "${CMAKE_CXX_COMPILER_LAUNCHER}"
)
