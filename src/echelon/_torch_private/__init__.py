"""Private interfaces of torch that Echelon uses, each with the reason.

Each private name is also in `_torch_versions.PRIVATE_NAMES`: a version of torch that lacks one is refused.
"""

from echelon._torch_versions import require

require()  # before a module imports private names: a version without one of them is refused with one line
