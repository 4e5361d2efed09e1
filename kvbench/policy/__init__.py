"""The contract between the methods, which decide, and the store, which executes.

A method is a `Policy`, a dataclass whose fields are its settings. It declares, with attributes that it assigns in
`declare` or in its class body, which precision tiers it uses (`tiers`), what it ranks tokens by (`score`), how much of
the cache it must see at once (`scope`), and a few things more; all have defaults. It answers two questions with
tensors: which tier does each prompt token go to (`plan_prefill`), and where does the next token go, which token makes
room for it, and does that one change tier or go (`plan_decode`). A third, optional answer evicts in bulk
(`plan_compact`). A policy never sees keys or values, never counts bytes, and does not depend on a backend. It ranks by
a `Statistic`: one of those here, or a small class in the method's own file, which the store runs on a layer's tensors.

Methods of one precision derive from `ByLayer`, with which a user may give some layers or heads another one. Methods
that rank tokens derive from `Ranked`, which has the plan of a prompt and the settings that compose, from `Scored`, with
which a user may evict again every so many decode steps, or from `Stepwise`, which makes room for every new token.
docs/reference/methods.md shows how the field's methods map onto this.
"""

from kvbench.errors import NotForModel, SettingsConflict, SettingValue
from kvbench.policy.allocation import Allocation, Shares, shares_by_score, shares_by_table
from kvbench.policy.base import Policy
from kvbench.policy.bounds import Bounds, Extent, quantised, within
from kvbench.policy.budget import Budget, BudgetText
from kvbench.policy.by_layer import ByLayer
from kvbench.policy.declare import (
    ALL_QUERIES,
    CodeBooks,
    Compaction,
    HeadScales,
    Probe,
    ReadSpec,
    Residual,
    ScoreSpec,
    TierTable,
)
from kvbench.policy.eviction import Protect, shrink_to_share
from kvbench.policy.plans import APPEND, EVICT, CompactPlan, DecodePlan, Extreme, PrefillPlan, SlotArrays
from kvbench.policy.ranked import Ranked, Scored, Steps
from kvbench.policy.ranking import (
    TwoStages,
    keep_blocks,
    largest_remainder,
    num_blocks,
    pyramid_budgets,
    rank_descending,
    share_with_cap,
    uniform,
)
from kvbench.policy.settings import CHUNK, TierText, check_chunk, check_chunk_devices, check_sizes
from kvbench.policy.statistics import (
    AttentionCall,
    BelowUniform,
    KeyNorms,
    LayerTensors,
    Need,
    Probability,
    Replay,
    Statistic,
    WithValueNorms,
)
from kvbench.policy.stepwise import Stepwise
from kvbench.policy.tiers import ALLOWED_BITS, Tier
from kvbench.policy.views import GONE, DecodeView, PrefillView
from kvbench.rules import MAX_TOKENS, TABLE_OR_PATH, Choice, Number, Several, Text, Whole
from kvbench.rules.counting import Unless
from kvbench.rules.tables import read_table
