"""The old place of Flag, for modules that still import it from here."""

from megatron_datastates.flag import Flag as Flag
