#include "run.hpp"

template int ns::run<ns::Float16>(const NsCall &, const ns::Problem &);
