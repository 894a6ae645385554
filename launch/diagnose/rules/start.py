"""Rules for what a start refuses: the recipe, the data, the checkpoint or the folder is wrong."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="The run does not start", level=Level.FAULT, action=Action.STOP)

RULES = (
    _rule(
        name="recipe-missing",
        level=Level.MANUAL,
        sees=("the recipe ... does not exist",),
        cause="the path is wrong",
        remedy="`ls recipes/` shows the examples",
    ),
    _rule(
        name="override-form",
        level=Level.MANUAL,
        sees=("the override ... must have the form SECTION.KEY=VALUE",),
        cause="a word on the command line is neither an option nor a setting",
        remedy="write `train.steps=200`; quote values with blanks",
    ),
    _rule(
        name="no-data-set",
        sees=("no data set in ...",),
        cause="`data.sources` names a folder without a manifest",
        remedy="build one: `keepstep data build`",
    ),
    _rule(
        name="data-manifest-changed",
        sees=("it states the checksum ..., but its content has",),
        cause="the manifest of a data set was changed or damaged",
        remedy="restore it from a copy, or build the data set again",
    ),
    _rule(
        name="link-leads-out",
        sees=("is a link that leads out of",),
        cause="a file of a data set or of a checkpoint is a link to elsewhere",
        remedy="put the file itself there, or name the folder where it is",
    ),
    _rule(
        name="fifo",
        sees=("a FIFO (named pipe)",),
        cause="a FIFO stands where a file was expected; a reader would wait for its writer",
        remedy="remove it, or name the files",
    ),
    _rule(
        name="checkpoint-forged",
        sees=("Keepstep did not save this checkpoint so",),
        cause="a checkpoint's manifest contradicts itself: it was forged, or another program wrote it",
        remedy="use a checkpoint that Keepstep saved",
    ),
    _rule(
        name="disk-full-for-output",
        level=Level.MANUAL,
        sees=("no space is left for",),
        cause="the disk of the output is full",
        remedy="free some space; the message says what the same command does then",
    ),
    _rule(
        name="vocabulary-too-small",
        sees=("must be at least the tokenizer's size",),
        cause="the model's vocabulary is smaller than the tokenizer's",
        remedy="set `model.vocab_size` to the value in the message",
    ),
    _rule(
        name="seq-len-does-not-divide-rows",
        sees=("must divide the rows of data.sources",),
        cause="the rows of the data are not a multiple of `model.seq_len`",
        remedy="choose a divisor, or `keepstep data repack`",
    ),
    _rule(
        name="batch-does-not-divide",
        sees=("must be a multiple of train.micro_batch_size ... data-parallel ranks",),
        cause="the global batch does not divide over the ranks",
        remedy="use one of the sizes in the message, or another number of ranks",
    ),
    _rule(
        name="run-in-use",
        sees=("the run folder ... is in use by ...",),
        cause="another process holds the lease",
        remedy="wait for it, `keepstep stop RUN`, or another `name`",
    ),
    _rule(
        name="disk-too-small",
        sees=("GiB free, but the remaining checkpoints need",),
        cause="the disk is too small for the checkpoints still to come",
        remedy="free space, or lower `checkpoint.keep_last`",
    ),
    _rule(
        name="checkpoint-of-another-run",
        sees=("the checkpoint of step ... belongs to another run",),
        cause="the folder has checkpoints of another model, schedule or data",
        remedy="use another `name`, or allow the difference ([resume](checkpoints.md#resume))",
    ),
    _rule(
        name="no-good-checkpoint",
        sees=("no good checkpoint is left",),
        cause="all checkpoints of the run are damaged, or incomplete because nodes of the fast tier are lost",
        remedy="restore one from a copy, or remove the damaged ones to start again from zero",
    ),
    _rule(
        name="fast-tier-of-another-user",
        sees=("in the fast tier belongs to user",),
        cause="someone else made the run's folder in `checkpoint.local_dir`",
        remedy="remove that folder, or use a `checkpoint.local_dir` of your own",
    ),
    _rule(
        name="password-in-address",
        sees=("has a password in it",),
        cause="an address in a recipe, an option or an argument contains a password",
        remedy="name a variable: `https://me:$DATA_PASSWORD@host` ([passwords](object-stores.md#passwords))",
    ),
    _rule(
        name="address-for-folder",
        sees=("must be a folder of a file system, not an address",),
        cause="`runs_dir` or `checkpoint.local_dir` is in an object store",
        remedy="a shared folder; [copy checkpoints](object-stores.md#copy-checkpoints) to the store",
    ),
    _rule(
        name="recipe-cut-off",
        sees=("is cut off: its last line must be",),
        cause="the `recipe.yaml` of a run folder is not complete",
        remedy="use the recipe that the run was started with",
    ),
    _rule(
        name="control-characters",
        sees=("one line without control characters",),
        cause="a setting or option has a line break or another control character",
        remedy="remove it",
    ),
    _rule(
        name="more-ranks-than-gpus",
        level=Level.MANUAL,
        sees=("is more than this machine's GPUs",),
        cause="`--ranks` exceeds the GPUs",
        remedy="fewer ranks, or `parallel.device=cpu`",
    ),
    _rule(
        name="fp8-needs-hopper",
        sees=("parallel.precision fp8 needs a CUDA device of compute capability",),
        cause="the device is older than Hopper, or there is none",
        remedy="`parallel.precision=bf16`",
    ),
    _rule(
        name="fp8-needs-compiler",
        sees=("precision (fp8) needs compile (false)",),
        cause="fp8 without the compiler is slower than bf16",
        remedy="`parallel.compile=true`",
    ),
    _rule(
        name="tensor-plan-missing",
        sees=("has no entry for it; add one, or set parallel.tensor to 1",),
        cause="a module of the model has no plan for tensor parallelism",
        remedy="see [extending](extending.md#a-new-block)",
    ),
    _rule(
        name="checkpoint-of-other-version",
        sees=("this Keepstep reads version ... use the Keepstep that wrote it",),
        cause="another version of Keepstep wrote the checkpoint",
        remedy="install the version that the message names, or import the weights into a new run",
    ),
    _rule(
        name="data-of-other-version",
        sees=("has shard version ...; this Keepstep reads ...: build the data set again",),
        cause="another version of Keepstep built the data set",
        remedy="build the data set again, or use the version that built it",
    ),
    _rule(
        name="checkpoint-of-other-model",
        sees=("are not those of the model and its optimizer", "tensors have another shape or type"),
        cause="the checkpoint has other tensors than the model and optimizer of the recipe",
        remedy="use the checkpoint's recipe, or another `name`",
    ),
)
"""The documentation keeps this order."""
