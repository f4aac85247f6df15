"""The lab: what has been claimed about attention, checked by running it. Only regard's public interface is used."""
