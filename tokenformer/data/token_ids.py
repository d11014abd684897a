"""The array type of token ids. Two bytes an id serve every vocabulary below 65,536."""

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint16]
