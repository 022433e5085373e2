# find_package(kvd CONFIG) gives the target kvd::kvd.
get_filename_component(_kvd_lib "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
get_filename_component(_kvd_prefix "${_kvd_lib}/.." ABSOLUTE)
find_path(_kvd_include kvd.h HINTS "${_kvd_prefix}/include" "${_kvd_prefix}/../include" NO_CACHE)
if(NOT TARGET kvd::kvd)
  add_library(kvd::kvd SHARED IMPORTED)
  set_target_properties(kvd::kvd PROPERTIES
    IMPORTED_LOCATION "${_kvd_lib}/libkvd.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_kvd_include}")
endif()
