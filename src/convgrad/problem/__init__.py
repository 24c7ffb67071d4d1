"""The vocabulary: a convolution as a frozen value and a line of text, its shapes, padding, validation, derivatives."""

from .arguments import Ints, Padding, all_arguments, as_text, constant_sizes, integers, paddings, require_bool
from .calculus import CONTRACTED, Form, Role, add_bias, contract, derivative, sum_of_bias, tangent
from .grammar import DTYPES, read_problem_file
from .padding_modes import Sides, by_pytorch, fits, fold, is_plain, pad
from .problem import (
    INT32_MAX,
    OPERANDS,
    OUTPUTS,
    PADDING_MODES,
    PASSES,
    RESULT,
    ConvProblem,
    Output,
    Outputs,
    PaddingMode,
    Pass,
    Slot,
    gradient_outputs,
    in_order,
    passes_of,
    shown_outputs,
)
from .shapes import (
    Geometry,
    channels_of_output,
    check_rank,
    conv_geometry,
    convolution_shape,
    layout_of,
    padding_pairs,
    problem_of,
)
from .sizes import Dimension, effective_kernel, fields_of, output_length
from .validation import check_backward, check_memory, check_operands, check_output_padding, refuse_nested
