// Rows: sets made of contiguous segments. Layer, RMS and L2 norms; channels-first batch, group and instance norms,
// whose segments are planes with one parameter each.
#pragma once
#include "rows_backward.hpp"
#include "rows_forward.hpp"
#include "rows_masked.hpp"
