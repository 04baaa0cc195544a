"""Policies, which assign a dtype to each op, and the autocast context that applies them."""

from halfstep._autocast.context import autocast as autocast
from halfstep._autocast.context import custom_bwd as custom_bwd
from halfstep._autocast.context import custom_fwd as custom_fwd
from halfstep._autocast.context import default_device as default_device
from halfstep._autocast.context import settled_policy as settled_policy
from halfstep._autocast.context import use_policy as use_policy
from halfstep._autocast.modules import keep as keep
from halfstep._autocast.modules import name_modules as name_modules
from halfstep._autocast.policy import Policy as Policy
from halfstep._autocast.policy import preset as preset
from halfstep._autocast.region import Region as Region
from halfstep._autocast.region import current_policy as current_policy
from halfstep._autocast.region import current_settings as current_settings
from halfstep._autocast.rule import HALVES as HALVES
from halfstep._autocast.rule import LOWER_PRECISIONS as LOWER_PRECISIONS
from halfstep._autocast.rule import Rule as Rule
from halfstep._autocast.rule import holds_where as holds_where
from halfstep._autocast.scopes import Settings as Settings
