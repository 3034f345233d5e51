# shellcheck shell=bash
# Long options for the shell scripts, Kaldi fashion: an option is a variable that the script sets between the lines
# "# options:" and "# end of options", with its help behind it. One definition serves default, parser and --help.
#
#     . scripts/parse_options.sh
#     # options:
#     n_gpus=      # GPUs to use
#     # end of options
#     parse_options "$@"        # --n-gpus 4 or --n-gpus=4 sets n_gpus; --force sets force=true where it is false
#
# Leaves what is no option in `positional`, what stands behind `--` in `extra`, and 1 in `help` for --help or -h.
# An unknown option or one without its value ends the script with status 2.

# option_lines: prints the option block of the calling script, one "name=default  # help" a line.
option_lines() { sed -n '/^# options:/,/^# end of options/p' "$0" | grep -E '^[a-z_]+='; }

# print_options: prints "--name   help [value]" for each option, with the values that hold now.
print_options() {
    local _line _name
    while IFS= read -r _line; do
        _name=${_line%%=*}
        printf '  --%-20s %s%s\n' "${_name//_/-}" "${_line#*# }" "${!_name:+ [${!_name}]}"
    done < <(option_lines)
}

# The names with an underscore are no options, so that a local one never hides the variable to set.
parse_options() {
    local _known _name _variable _value
    _known=$(option_lines | cut -d= -f1)
    # shellcheck disable=SC2034  # the caller reads them
    positional=() extra=() help=0
    while (($#)); do
        case $1 in
        --)
            shift
            # shellcheck disable=SC2034
            extra=("$@")
            return
            ;;
        -h | --help)
            # shellcheck disable=SC2034
            help=1
            ;;
        --*)
            _name=${1#--}
            _value=${_name#*=}
            _name=${_name%%=*}
            _variable=${_name//-/_}
            if [[ $_name == *_* ]] || ! grep -qxF -- "$_variable" <<<"$_known"; then
                echo "$0: unknown option --$_name; \"bash $0 --help\" lists the options" >&2
                exit 2
            fi
            if [[ $1 != *=* && ${!_variable} == @(true|false) && ${2-} != @(true|false) ]]; then
                _value=true # a switch may stand without its value
            elif [[ $1 != *=* ]]; then
                (($# > 1)) || { echo "$0: option --$_name needs a value" >&2 && exit 2; }
                _value=$2
                shift
            fi
            printf -v "$_variable" %s "$_value"
            ;;
        -[0-9]*) positional+=("$1") ;;
        -*)
            echo "$0: unknown option $1; options are long ones, \"bash $0 --help\" lists them" >&2
            exit 2
            ;;
        *) positional+=("$1") ;;
        esac
        shift
    done
}
