"""All mutants."""

from tests.mutants.components import COMPONENTS
from tests.mutants.engine import ENGINE
from tests.mutants.graph_tools import GRAPH_TOOLS
from tests.mutants.hooks import HOOKS
from tests.mutants.models import MODELS
from tests.mutants.tools import TOOLS

MUTANTS = [*HOOKS, *COMPONENTS, *MODELS, *ENGINE, *TOOLS, *GRAPH_TOOLS]
