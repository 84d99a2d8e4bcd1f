"""The compiler's passes, a file each, in pipeline order.

1. ``trace``: the user's module becomes a functional graph of high-level ops.
2. ``canonicalize``: one spelling for every construct the later passes reason about.
3. ``randomize``: random ops become functions of seed, step and place, the same on every grid.
4. ``propagate``: a strategy for every node, chosen by cost.
5. ``rewrite``: the global graph and the plan become the local forward graph, collectives as nodes.
6. ``differentiate``: the local program's forward and backward graphs; with a bound on memory,
   ``recompute`` says what the backward computes again.
7. ``widen``: gradients are reduced in a wider dtype, where that is asked for.
8. ``defer``: the reductions of gradients in a graph of their own, where gradients are accumulated.
9. ``bucket``: small collectives of one kind and axis become one.
10. ``overlap``: collectives start as early, and are waited for as late, as the data allows.

Every pass is a pure function: it builds a new graph and never edits its input.

The folder lies at the top of the repository and is linked into the package, so its import name is
``autopar3d.passes``.
"""

if __name__ != "autopar3d.passes":
    # From the repository's root `import passes` would find this folder and load a second copy of every pass,
    # whose classes and registries are not those of the package.
    raise ImportError(f"import autopar3d.passes, not {__name__}: the folder is linked into the package")
