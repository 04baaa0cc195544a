"""Why a step went bad: the op, the module, the line, the cause and the cure."""
