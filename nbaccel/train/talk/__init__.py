"""How ranks talk: the process group, collectives over nested containers, objects, and the checks that they agree."""
